// The storages that intercepted operators have seen, each under a small number.
//
// One mutex guards the table. No function here runs an operator or calls into Rust.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "shim.h"

#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace plimsoll {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;

class Entries {
 public:
  // The entry of a storage, made where there is none.
  PlimsollEntry of(c10::StorageImpl* storage);
  // The entry of a storage, or 0.
  PlimsollEntry find(c10::StorageImpl* storage);
  // An entry that keeps its storage alive: one that stands beside the program.
  PlimsollEntry beside(Storage storage);

  // The storage, alive for as long as the result is held; throws where it has died.
  Storage lock(PlimsollEntry entry);
  void hold(PlimsollEntry entry);
  void unhold(PlimsollEntry entry);
  // Whether only hold() keeps the storage alive.
  bool is_orphan(PlimsollEntry entry);

  void* park(PlimsollEntry entry);
  void unpark(PlimsollEntry entry);
  void release(PlimsollEntry entry);
  void* allocate(PlimsollEntry entry);
  void adopt(PlimsollEntry from, PlimsollEntry to);
  void discard(PlimsollEntry entry);

  // Remembers what a storage holds, until it is asked whether it holds it still.
  void watch(PlimsollEntry entry, const c10::StorageImpl& storage);
  // Whether a watched storage holds something else by now. Ends the watch.
  bool has_changed(PlimsollEntry entry, const c10::StorageImpl& storage);

  // The storage of an entry has died: its bytes, or what stood for them, were freed.
  void note_freed(PlimsollEntry entry);
  size_t take_freed(PlimsollEntry* out, size_t capacity);
  void forget(PlimsollEntry entry);

 private:
  struct Entry {
    c10::StorageImpl* storage = nullptr;
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;
    Storage held;
    at::DataPtr parked;
    std::optional<uint64_t> watched;  // digest of the bytes
    bool taken = false;
    Entry() : weak(Storage()) {}
  };

  Entry& at(PlimsollEntry entry);
  PlimsollEntry add(c10::StorageImpl* storage);
  void clear(PlimsollEntry entry);
  static at::DataPtr take_parked(Entry& entry);

  std::mutex mutex_;
  std::mutex freed_mutex_;
  std::deque<Entry> entries_;
  std::vector<PlimsollEntry> vacant_;
  std::unordered_map<c10::StorageImpl*, PlimsollEntry> numbers_;
  std::vector<PlimsollEntry> freed_;
};

Entries& entries();

}  // namespace plimsoll
