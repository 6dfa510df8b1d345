#include "entries.h"

#include "allocator.h"

#include <cstring>

namespace plimsoll {

Entries& entries() {
  static auto* table = new Entries();  // outlives every tensor
  return *table;
}

Entries::Entry& Entries::at(PlimsollEntry entry) {
  TORCH_CHECK(entry > 0 && entry <= entries_.size() && entries_[entry - 1].taken, "no storage has number ", entry);
  return entries_[entry - 1];
}

PlimsollEntry Entries::add(c10::StorageImpl* storage) {
  PlimsollEntry number;
  if (vacant_.empty()) {
    entries_.emplace_back();
    number = static_cast<PlimsollEntry>(entries_.size());
  } else {
    number = vacant_.back();
    vacant_.pop_back();
  }
  Entry& entry = entries_[number - 1];
  entry.taken = true;
  entry.storage = storage;
  c10::raw::weak_intrusive_ptr::incref(storage);
  entry.weak = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(storage);
  numbers_[storage] = number;
  set_owner(storage->data_ptr(), number);
  return number;
}

PlimsollEntry Entries::of(c10::StorageImpl* storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = numbers_.find(storage);
  return found == numbers_.end() ? add(storage) : found->second;
}

PlimsollEntry Entries::find(c10::StorageImpl* storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = numbers_.find(storage);
  return found == numbers_.end() ? 0 : found->second;
}

PlimsollEntry Entries::beside(Storage storage) {
  std::lock_guard<std::mutex> lock(mutex_);
  PlimsollEntry number = add(storage.get());
  set_owner(storage->data_ptr(), 0);  // its death is ours to decide
  at(number).held = std::move(storage);
  return number;
}

Storage Entries::lock(PlimsollEntry entry) {
  std::lock_guard<std::mutex> guard(mutex_);
  Storage storage = at(entry).weak.lock();
  TORCH_CHECK(storage, "the storage with number ", entry, " has died");
  return storage;
}

void Entries::hold(PlimsollEntry entry) {
  Storage storage = lock(entry);
  std::lock_guard<std::mutex> guard(mutex_);
  at(entry).held = std::move(storage);
}

void Entries::unhold(PlimsollEntry entry) {
  Storage dying;  // outlives the lock: its bytes' deleter reports to this table
  std::lock_guard<std::mutex> guard(mutex_);
  dying = std::move(at(entry).held);
}

bool Entries::is_orphan(PlimsollEntry entry) {
  std::lock_guard<std::mutex> guard(mutex_);
  const Entry& kept = at(entry);
  return kept.held && kept.held.use_count() == 1;
}

void* Entries::park(PlimsollEntry entry) {
  Storage storage = lock(entry);
  std::lock_guard<std::mutex> guard(mutex_);
  Entry& kept = at(entry);
  TORCH_CHECK(!kept.parked, "the bytes of storage ", entry, " are parked already");
  set_owner(storage->data_ptr(), 0);
  kept.parked = storage->set_data_ptr(absent_bytes(storage->device(), entry));
  return kept.parked.get();
}

void Entries::unpark(PlimsollEntry entry) {
  Storage storage = lock(entry);
  at::DataPtr absent;  // freed without its owner's report
  std::lock_guard<std::mutex> guard(mutex_);
  Entry& kept = at(entry);
  TORCH_CHECK(kept.parked, "storage ", entry, " has no bytes parked");
  set_owner(kept.parked, entry);
  absent = storage->set_data_ptr(take_parked(kept));
  absent.release_context();
}

void Entries::release(PlimsollEntry entry) {
  at::DataPtr bytes;
  std::lock_guard<std::mutex> guard(mutex_);
  bytes = take_parked(at(entry));
}

void* Entries::allocate(PlimsollEntry entry) {
  Storage storage = lock(entry);
  auto* allocator = storage->allocator() ? storage->allocator() : c10::GetAllocator(storage->device_type());
  at::DataPtr bytes = allocator->allocate(storage->nbytes());
  std::lock_guard<std::mutex> guard(mutex_);
  Entry& kept = at(entry);
  TORCH_CHECK(!kept.parked, "storage ", entry, " has bytes parked already");
  kept.parked = std::move(bytes);
  return kept.parked.get();
}

void Entries::adopt(PlimsollEntry from, PlimsollEntry to) {
  Storage target = lock(to);
  Storage source = lock(from);
  at::DataPtr absent;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(source->nbytes() == target->nbytes(), "a rerun made ", source->nbytes(), " bytes for a storage of ",
                target->nbytes());
    at::DataPtr bytes = source->set_data_ptr(at::DataPtr(nullptr, source->device()));
    set_owner(bytes, to);
    absent = target->set_data_ptr(std::move(bytes));
    absent.release_context();
  }
  discard(from);
}

void Entries::discard(PlimsollEntry entry) {
  Storage dying;
  std::lock_guard<std::mutex> guard(mutex_);
  dying = std::move(at(entry).held);
  clear(entry);
}

// A DataPtr that was moved from still looks taken.
at::DataPtr Entries::take_parked(Entry& entry) {
  at::DataPtr bytes = std::move(entry.parked);
  entry.parked = at::DataPtr();
  return bytes;
}

void Entries::clear(PlimsollEntry entry) {
  Entry& kept = at(entry);
  numbers_.erase(kept.storage);
  kept.storage = nullptr;
  kept.weak = c10::weak_intrusive_ptr<c10::StorageImpl>(Storage());
  kept.watched.reset();
  kept.taken = false;
  vacant_.push_back(entry);
}

namespace {

// Tells bytes apart that were filled in from bytes that were not; not for adversaries.
uint64_t digest(const c10::StorageImpl& storage) {
  const auto* bytes = static_cast<const uint8_t*>(storage.data());
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t at = 0; bytes && at < storage.nbytes(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof word, storage.nbytes() - at));
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

void Entries::watch(PlimsollEntry entry, const c10::StorageImpl& storage) {
  std::lock_guard<std::mutex> guard(mutex_);
  at(entry).watched = digest(storage);
}

bool Entries::has_changed(PlimsollEntry entry, const c10::StorageImpl& storage) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto& watched = at(entry).watched;
  bool changed = watched && *watched != digest(storage);
  watched.reset();
  return changed;
}

void Entries::note_freed(PlimsollEntry entry) {
  std::lock_guard<std::mutex> guard(freed_mutex_);
  freed_.push_back(entry);
}

size_t Entries::take_freed(PlimsollEntry* out, size_t capacity) {
  std::lock_guard<std::mutex> guard(freed_mutex_);
  size_t count = std::min(capacity, freed_.size());
  std::copy(freed_.begin(), freed_.begin() + count, out);
  freed_.erase(freed_.begin(), freed_.begin() + count);
  return count;
}

void Entries::forget(PlimsollEntry entry) {
  at::DataPtr bytes;
  std::lock_guard<std::mutex> guard(mutex_);
  bytes = take_parked(at(entry));
  clear(entry);
}

}  // namespace plimsoll
