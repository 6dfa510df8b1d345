// The storages that intercepted operators have seen, each under a small number.
//
// An allocation of ours carries the number of its storage, so the table is not searched on the way of an operator; and what has been
// seen where it still is needs not even be looked up by its address. One lock guards the table. No function here calls into Rust, or
// runs an operator, but for digests on an accelerator.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include "allocator.h"
#include "shim.h"
#include "streams.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace plimsoll {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;

// What a storage holds, in 64 bits, found out by its own device, each of which has its own way. Tells bytes apart that were changed
// from bytes that were not; not for adversaries.
uint64_t digest(const c10::StorageImpl& storage);

// A lock that is held for some tens of instructions.
class ShortLock {
 public:
  void lock() noexcept {
    if (C10_UNLIKELY(taken_.exchange(true, std::memory_order_acquire))) wait();
  }
  void unlock() noexcept { taken_.store(false, std::memory_order_release); }

 private:
  void wait() noexcept;
  std::atomic<bool> taken_{false};
};

// Why a storage stays that somebody has the address of.
constexpr const char* kLent = "shared with others, by its address";

class Entries {
 public:
  // The entry of a storage, made where there is none; whether its bytes are somebody else's, where one that was resized to none has
  // none of anybody's; and whether they are elsewhere.
  struct Seen {
    PlimsollEntry entry;
    bool is_foreign, is_away;
  };
  Seen see(c10::StorageImpl* storage) {
    if (C10_LIKELY(!are_moved_in_several_threads_.load(std::memory_order_relaxed))) {
      PlimsollEntry number = recent(storage).load(std::memory_order_relaxed);
      if (C10_LIKELY(number && is_where_it_was(slot(number), storage))) return {number, false, false};
    }
    return look_up(storage);
  }
  // From now on more than one thread moves storages: where their bytes are is only looked up with the lock held.
  void move_in_several_threads() { are_moved_in_several_threads_.store(true, std::memory_order_relaxed); }
  // The entry of a storage, or 0.
  PlimsollEntry find(c10::StorageImpl* storage);
  // Keeps a storage that has no entry from getting one until give_back(): a bystander uses it. Whether it has none.
  bool borrow_unless_known(c10::StorageImpl* storage);
  void give_back(c10::StorageImpl* storage);
  // In a process that was forked, with the locks held as below: those who have borrowed them are not there.
  void forget_borrowed() { borrowed_.clear(); }
  // An entry that keeps its storage alive: one that stands beside the program.
  PlimsollEntry beside(Storage storage);

  // The storage, alive for as long as the result is held; throws where it has died.
  Storage lock(PlimsollEntry entry);
  void hold(PlimsollEntry entry);
  void unhold(PlimsollEntry entry);
  // Whether only hold() keeps the storage alive. Not said of what dies without a report: see find_dead().
  bool is_orphan(PlimsollEntry entry);

  void* park(PlimsollEntry entry);
  void unpark(PlimsollEntry entry);
  void release(PlimsollEntry entry);
  void* allocate(PlimsollEntry entry);
  void adopt(PlimsollEntry from, PlimsollEntry to);
  void discard(PlimsollEntry entry);

  // Remembers what a storage holds, until it is asked whether it holds it still.
  void watch(PlimsollEntry entry, const c10::StorageImpl& storage);
  // Whether any is.
  bool watches_any() const { return watched_.load(std::memory_order_relaxed) > 0; }
  // Whether a watched storage holds something else by now.
  bool has_changed(PlimsollEntry entry, const c10::StorageImpl& storage, bool ends_watch) {
    return watches_any() && has_changed_if_watched(entry, storage, ends_watch);
  }

  // Somebody has the address of its bytes from now on, which are ours; whatever thread says so, and whether anybody listens or not.
  void lend(c10::StorageImpl* storage);
  // Why it stays then; null of any other.
  const char* lent(PlimsollEntry entry) const {
    return has_lent_.load(std::memory_order_relaxed) && slot(entry).is_lent ? kLent : nullptr;
  }

  // The program says that another stream than theirs may use these bytes, for as long as they live. `record` says so of the block that
  // holds them, and no other thread moves them meanwhile; of those that are away it is said when they come back.
  void note_other_stream(const at::DataPtr& bytes, c10::Stream stream, c10::function_ref<void()> record);

  // Whether it is watched, and another thread may take its bytes away.
  bool is_watched_by_several(PlimsollEntry entry) {
    return watches_any() && are_moved_in_several_threads_.load(std::memory_order_relaxed) && is_watched(entry);
  }

  // The storage of an entry has died: its bytes, or what stood for them, were freed.
  void note_freed(PlimsollEntry entry);
  // Notes the storages that died without a report: those whose bytes are not ours, and those that have none. Between iterations, so that
  // it does not depend on the table when an iteration learns of it; but where there are very many.
  void find_dead();
  size_t take_freed(PlimsollEntry* out, size_t capacity);
  void forget(PlimsollEntry entry);

  // Bytes that the table takes.
  size_t bytes();

  // Takes the table's locks before the process forks, and gives them back in both processes: the child has no other
  // thread that could.
  void lock_for_fork();
  void unlock_after_fork();

 private:
  void find_dead_with_lock();

  // What few entries have.
  struct Extension {
    Storage held;
    at::DataPtr parked;
    std::optional<void*> stream;      // that the program had its bytes allocated for, once they have been parked
    OtherStreams others;              // that may use them, as the program says, once they have been parked
    std::optional<uint64_t> watched;  // digest of the bytes
  };

  struct Entry {
    std::atomic<c10::StorageImpl*> storage{nullptr};  // a weak reference; null where the number is free
    std::atomic<const void*> bytes{nullptr};          // where bytes of ours are that name this entry, or were before it was parked
    std::unique_ptr<Extension> extension;
    bool is_listed = false;  // in `listed_`
    bool is_lent = false;
  };

  static constexpr size_t kChunk = 1024;
  static constexpr size_t kListedMore = 1 << 13;
  static constexpr size_t kChunks = size_t{1} << 14;
  static constexpr unsigned kRecentBits = 12;

  Entry& slot(PlimsollEntry entry) const { return chunks_[(entry - 1) / kChunk].load(std::memory_order_acquire)[(entry - 1) % kChunk]; }
  Entry& at(PlimsollEntry entry);
  Extension& extension(PlimsollEntry entry);
  void* stream_of(PlimsollEntry entry);
  // Says of the block that holds its bytes now which other streams may use it.
  void record_other_streams(PlimsollEntry entry, const at::DataPtr& bytes);
  // Where to find the number of a storage that was seen not long ago; that of another one, or of none, stands there, too.
  std::atomic<PlimsollEntry>& recent(const c10::StorageImpl* storage) {
    return recent_[reinterpret_cast<uintptr_t>(storage) * 0x9e3779b97f4a7c15 >> (64 - kRecentBits)];
  }
  // Whether that is its entry, and it has the bytes that name it, which nobody has freed since.
  static bool is_where_it_was(const Entry& kept, const c10::StorageImpl* storage) {
    const at::DataPtr& bytes = storage->data_ptr();
    return kept.storage.load(std::memory_order_relaxed) == storage && bytes.get() &&
           kept.bytes.load(std::memory_order_relaxed) == bytes.get() && bytes.get_deleter() == counted_deleter;
  }
  Seen look_up(c10::StorageImpl* storage);
  // Has bytes name an entry. Whether they are ours, so that they can.
  bool name(const at::DataPtr& bytes, PlimsollEntry entry, bool reports_death = true);
  // The number that bytes have, if they still belong to that storage; else 0.
  PlimsollEntry named(std::optional<uint32_t> owner, const c10::StorageImpl* storage) const;
  PlimsollEntry add(c10::StorageImpl* storage, bool reports_death);
  PlimsollEntry next_number();
  void clear(PlimsollEntry entry, Entry& kept);
  // With the lock held.
  PlimsollEntry find_with_lock(c10::StorageImpl* storage);
  PlimsollEntry find_without_header(c10::StorageImpl* storage);
  // Until nobody has borrowed the storage. Without the lock meanwhile.
  void wait_until_given_back(std::unique_lock<ShortLock>& lock, c10::StorageImpl* storage);
  bool is_watched(PlimsollEntry entry);
  bool has_changed_if_watched(PlimsollEntry entry, const c10::StorageImpl& storage, bool ends_watch);
  static at::DataPtr take_parked(Entry& entry);

  mutable std::atomic<Entry*> chunks_[kChunks] = {};
  std::atomic<PlimsollEntry> recent_[size_t{1} << kRecentBits] = {};
  size_t taken_numbers_ = 0;
  ShortLock mutex_;
  std::vector<PlimsollEntry> vacant_;
  std::vector<c10::StorageImpl*> borrowed_;  // once for each operator of a bystander's
  // Storages whose bytes have no header of ours: foreign ones, and empty ones.
  std::unordered_map<c10::StorageImpl*, PlimsollEntry> listed_;
  // How many may be listed before the dead among them are looked for.
  size_t listed_max_ = kListedMore;
  std::atomic<bool> has_lent_{false};
  std::atomic<size_t> watched_{0};
  std::atomic<bool> are_moved_in_several_threads_{false};
  ShortLock freed_mutex_;
  std::atomic<size_t> freed_count_{0};
  std::vector<PlimsollEntry> freed_;
};

extern Entries& the_entries;
inline Entries& entries() { return the_entries; }

}  // namespace plimsoll
