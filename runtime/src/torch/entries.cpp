#include "entries.h"

#include "accelerator.h"
#include "allocator.h"
#include "bystanders.h"
#include "streams.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace plimsoll {
namespace {

using Guard = std::lock_guard<ShortLock>;

// In a header: the storage stands beside the program, and its death is ours to decide.
constexpr uint32_t kBeside = uint32_t{1} << 31;

// Whether nobody refers to a storage weakly, as the table does to those that are in it.
bool is_unknown(c10::StorageImpl* storage) {
  Storage looked_at = Storage::reclaim(storage);
  bool unknown = looked_at.weak_use_count() == 1;
  looked_at.release();
  return unknown;
}

uint64_t mixed(uint64_t hash, const uint8_t* bytes, size_t count = sizeof(uint64_t)) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, count);
  hash = (hash ^ word) * 0x100000001b3;
  return hash ^ hash >> 29;
}

}  // namespace

void ShortLock::wait() noexcept {
  for (int tries = 0; taken_.exchange(true, std::memory_order_acquire); ++tries)
    if (tries > 16) std::this_thread::yield();
}

Entries& the_entries = *new Entries();  // outlives every tensor

Entries::Entry& Entries::at(PlimsollEntry entry) {
  TORCH_CHECK(entry > 0 && entry <= taken_numbers_ && slot(entry).storage.load(std::memory_order_relaxed),
              "no storage has number ", entry);
  return slot(entry);
}

Entries::Extension& Entries::extension(PlimsollEntry entry) {
  auto& extension = at(entry).extension;
  if (!extension) extension = std::make_unique<Extension>();
  return *extension;
}

PlimsollEntry Entries::named(std::optional<uint32_t> owner, const c10::StorageImpl* storage) const {
  PlimsollEntry number = owner.value_or(0) & ~kBeside;
  return number && slot(number).storage.load(std::memory_order_relaxed) == storage ? number : 0;
}

PlimsollEntry Entries::next_number() {
  if (!vacant_.empty()) {
    PlimsollEntry number = vacant_.back();
    vacant_.pop_back();
    return number;
  }
  size_t chunk = taken_numbers_ / kChunk;
  TORCH_CHECK(chunk < kChunks, "more than ", kChunk * kChunks, " storages are alive at once");
  if (taken_numbers_ % kChunk == 0) chunks_[chunk].store(new Entry[kChunk], std::memory_order_release);
  return static_cast<PlimsollEntry>(++taken_numbers_);
}

// Called with the lock held.
PlimsollEntry Entries::add(c10::StorageImpl* storage, bool reports_death) {
  PlimsollEntry number = next_number();
  c10::raw::weak_intrusive_ptr::incref(storage);
  Entry& kept = slot(number);
  kept.storage.store(storage, std::memory_order_relaxed);
  if (!name(storage->data_ptr(), number, reports_death)) {
    if (C10_UNLIKELY(listed_.size() >= listed_max_)) find_dead_with_lock();
    listed_[storage] = number;
    kept.is_listed = true;
  }
  return number;
}

bool Entries::name(const at::DataPtr& bytes, PlimsollEntry entry, bool reports_death) {
  auto before = set_owner(bytes, reports_death ? entry : entry | kBeside);
  if (!before) return false;
  // They were another storage's, which has to find its number by its bytes again.
  if (PlimsollEntry other = *before & ~kBeside; other && other != entry) slot(other).bytes.store(nullptr, std::memory_order_relaxed);
  return true;
}

void Entries::find_dead() {
  Guard guard(mutex_);
  find_dead_with_lock();
}

void Entries::find_dead_with_lock() {
  for (auto one = listed_.begin(); one != listed_.end();) {
    if (c10::raw::weak_intrusive_ptr::use_count(one->first) > 0) {
      ++one;
      continue;
    }
    slot(one->second).is_listed = false;
    note_freed(one->second);
    one = listed_.erase(one);
  }
  listed_max_ = 2 * listed_.size() + kListedMore;
}

Entries::Seen Entries::look_up(c10::StorageImpl* storage) {
  std::unique_lock<ShortLock> lock(mutex_);
  if (C10_UNLIKELY(are_moved_in_several_threads_.load(std::memory_order_relaxed))) wait_until_given_back(lock, storage);
  const at::DataPtr& bytes = storage->data_ptr();
  PlimsollEntry number = is_unknown(storage) ? 0 : find_with_lock(storage);
  if (!number) number = add(storage, true);
  // What is in its header, or its block's note, needs no look.
  bool is_ours = !slot(number).is_listed || owner_of(bytes), is_away = is_absent(bytes);
  if (is_ours && !is_away && bytes.get()) {
    slot(number).bytes.store(bytes.get(), std::memory_order_relaxed);
    recent(storage).store(number, std::memory_order_relaxed);
  }
  return {number, !is_ours && storage->nbytes() > 0, is_away};
}

void Entries::wait_until_given_back(std::unique_lock<ShortLock>& lock, c10::StorageImpl* storage) {
  while (std::count(borrowed_.begin(), borrowed_.end(), storage)) {
    lock.unlock();
    {
      WithoutPython others_go_on;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    lock.lock();
  }
}

PlimsollEntry Entries::find(c10::StorageImpl* storage) {
  Guard guard(mutex_);
  return find_with_lock(storage);
}

PlimsollEntry Entries::find_with_lock(c10::StorageImpl* storage) {
  PlimsollEntry number = named(owner_of(storage->data_ptr()), storage);
  return number ? number : find_without_header(storage);
}

PlimsollEntry Entries::find_without_header(c10::StorageImpl* storage) {
  if (is_unknown(storage)) return 0;
  auto found = listed_.find(storage);
  if (found == listed_.end()) return 0;
  PlimsollEntry number = found->second;
  // It was empty, and has got bytes since.
  if (name(storage->data_ptr(), number)) {
    slot(number).is_listed = false;
    listed_.erase(found);
  }
  return number;
}

bool Entries::borrow_unless_known(c10::StorageImpl* storage) {
  Guard guard(mutex_);
  if (find_with_lock(storage)) return false;
  // What is elsewhere is never evicted.
  if (storage->device_type() == counted_device().type()) {
    move_in_several_threads();
    borrowed_.push_back(storage);
  }
  return true;
}

void Entries::give_back(c10::StorageImpl* storage) {
  Guard guard(mutex_);
  auto found = std::find(borrowed_.begin(), borrowed_.end(), storage);
  if (found != borrowed_.end()) borrowed_.erase(found);
}

PlimsollEntry Entries::beside(Storage storage) {
  Guard guard(mutex_);
  PlimsollEntry number = add(storage.get(), false);
  extension(number).held = std::move(storage);
  return number;
}

Storage Entries::lock(PlimsollEntry entry) {
  auto known = [&] {
    Guard guard(mutex_);
    auto* storage = at(entry).storage.load(std::memory_order_relaxed);
    c10::raw::weak_intrusive_ptr::incref(storage);
    return c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(storage);
  }();
  // Python may be waited for, with whose help a storage is kept that only it has.
  Storage storage = known.lock();
  TORCH_CHECK(storage, "the storage with number ", entry, " has died");
  return storage;
}

void Entries::hold(PlimsollEntry entry) {
  Storage storage = lock(entry);
  Guard guard(mutex_);
  extension(entry).held = std::move(storage);
}

void Entries::unhold(PlimsollEntry entry) {
  Storage dying;  // outlives the lock: its bytes' deleter reports to this table
  Guard guard(mutex_);
  if (auto& extension = at(entry).extension) dying = std::move(extension->held);
}

bool Entries::is_orphan(PlimsollEntry entry) {
  Storage storage;
  {
    Guard guard(mutex_);
    const Entry& kept = at(entry);
    if (kept.is_listed || !kept.extension || !kept.extension->held) return false;
    storage = kept.extension->held;
  }
  // Held by the table, and here. What Python knows holds it, too, and is held in turn while others do.
  auto* python = storage->pyobj_slot();
  return storage.use_count() == (python->load_pyobj() ? 3 : 2) && (!python->load_pyobj() || python->has_unique_reference());
}

void* Entries::park(PlimsollEntry entry) {
  Storage storage = lock(entry);
  void* stream = accelerator_stream_of(storage->data_ptr());
  note_stream_of_bytes(stream);
  Guard guard(mutex_);
  Extension& kept = extension(entry);
  TORCH_CHECK(!kept.parked, "the bytes of storage ", entry, " are parked already");
  set_owner(storage->data_ptr(), 0);
  if (!kept.stream) kept.stream = stream;
  for (c10::Stream other : accelerator_other_streams_of(storage->data_ptr())) kept.others.add(other);
  kept.parked = storage->set_data_ptr(absent_bytes(storage->device(), entry));
  return kept.parked.get();
}

void Entries::unpark(PlimsollEntry entry) {
  Storage storage = lock(entry);
  at::DataPtr absent;  // freed without its owner's report
  {
    Guard guard(mutex_);
    Extension& kept = extension(entry);
    TORCH_CHECK(kept.parked, "storage ", entry, " has no bytes parked");
    name(kept.parked, entry);
    absent = storage->set_data_ptr(take_parked(at(entry)));
    absent.release_context();
  }
  record_other_streams(entry, storage->data_ptr());
}

void Entries::release(PlimsollEntry entry) {
  at::DataPtr bytes;
  Guard guard(mutex_);
  Entry& kept = at(entry);
  bytes = take_parked(kept);
  // Others may get what was there.
  kept.bytes.store(nullptr, std::memory_order_relaxed);
}

void* Entries::allocate(PlimsollEntry entry) {
  Storage storage = lock(entry);
  auto* allocator = storage->allocator() ? storage->allocator() : c10::GetAllocator(storage->device_type());
  InStream in_its_own(stream_of(entry));
  at::DataPtr bytes = allocator->allocate(storage->nbytes());
  Guard guard(mutex_);
  Extension& kept = extension(entry);
  TORCH_CHECK(!kept.parked, "storage ", entry, " has bytes parked already");
  kept.parked = std::move(bytes);
  return kept.parked.get();
}

void* Entries::stream_of(PlimsollEntry entry) {
  Guard guard(mutex_);
  const auto& extension = at(entry).extension;
  return extension ? extension->stream.value_or(nullptr) : nullptr;
}

void Entries::note_other_stream(const at::DataPtr& bytes, c10::Stream stream, c10::function_ref<void()> record) {
  Guard guard(mutex_);
  if (is_absent(bytes)) {
    extension(*owner_of(bytes)).others.add(stream);
  } else {
    record();
  }
}

void Entries::record_other_streams(PlimsollEntry entry, const at::DataPtr& bytes) {
  OtherStreams others;
  {
    Guard guard(mutex_);
    if (const auto& extension = at(entry).extension) others = extension->others;
  }
  for (c10::Stream stream : others) use_in_stream(bytes, stream);
}

void Entries::adopt(PlimsollEntry from, PlimsollEntry to) {
  Storage target = lock(to);
  Storage source = lock(from);
  // Another stream's, where that ran what made it: before it is used again there, this one has let go of it.
  if (void* stream = stream_of(to); stream != accelerator_stream_of(source->data_ptr()))
    use_in_stream(source->data_ptr(), stream_of_cuda(stream));
  at::DataPtr absent;
  {
    Guard guard(mutex_);
    TORCH_CHECK(source->nbytes() == target->nbytes(), "a rerun made ", source->nbytes(), " bytes for a storage of ",
                target->nbytes());
    at::DataPtr bytes = source->set_data_ptr(at::DataPtr(nullptr, source->device()));
    name(bytes, to);
    absent = target->set_data_ptr(std::move(bytes));
    absent.release_context();
  }
  record_other_streams(to, target->data_ptr());
  discard(from);
}

void Entries::discard(PlimsollEntry entry) {
  Storage dying;
  Guard guard(mutex_);
  Entry& kept = at(entry);
  if (kept.extension) dying = std::move(kept.extension->held);
  clear(entry, kept);
}

// A DataPtr that was moved from still looks taken.
at::DataPtr Entries::take_parked(Entry& entry) {
  if (!entry.extension) return {};
  at::DataPtr bytes = std::move(entry.extension->parked);
  entry.extension->parked = at::DataPtr();
  return bytes;
}

void Entries::clear(PlimsollEntry entry, Entry& kept) {
  auto* storage = kept.storage.load(std::memory_order_relaxed);
  kept.storage.store(nullptr, std::memory_order_relaxed);
  kept.bytes.store(nullptr, std::memory_order_relaxed);
  if (std::exchange(kept.is_listed, false)) listed_.erase(storage);
  if (kept.extension && kept.extension->watched) watched_.fetch_sub(1, std::memory_order_relaxed);
  kept.extension.reset();
  kept.is_lent = false;
  c10::raw::weak_intrusive_ptr::decref(storage);
  vacant_.push_back(entry);
}

uint64_t digest(const c10::StorageImpl& storage) {
  if (!storage.device().is_cpu() && storage.data()) return digest_on_accelerator(storage);
  const auto* bytes = static_cast<const uint8_t*>(storage.data());
  size_t count = bytes ? storage.nbytes() : 0;
  // Chains that do not wait for each other, as the steps of one do.
  std::array<uint64_t, 8> chains{1, 2, 3, 4, 5, 6, 7, 8};
  size_t at = 0;
  for (; at + sizeof chains <= count; at += sizeof chains)
    for (size_t chain = 0; chain < chains.size(); ++chain)
      chains[chain] = mixed(chains[chain], bytes + at + chain * sizeof(uint64_t));
  uint64_t hash = 0xcbf29ce484222325;
  for (; at < count; at += sizeof(uint64_t)) hash = mixed(hash, bytes + at, std::min(sizeof(uint64_t), count - at));
  for (uint64_t chain : chains) hash = mixed(hash, reinterpret_cast<const uint8_t*>(&chain));
  return hash;
}

void Entries::watch(PlimsollEntry entry, const c10::StorageImpl& storage) {
  uint64_t held = digest(storage);
  Guard guard(mutex_);
  auto& watched = extension(entry).watched;
  if (!watched) watched_.fetch_add(1, std::memory_order_relaxed);
  watched = held;
}

void Entries::lend(c10::StorageImpl* storage) {
  if (!owner_of(storage->data_ptr()) || storage->nbytes() == 0) return;
  PlimsollEntry entry = see(storage).entry;
  Guard guard(mutex_);
  at(entry).is_lent = true;
  has_lent_.store(true, std::memory_order_relaxed);
}

bool Entries::is_watched(PlimsollEntry entry) {
  Guard guard(mutex_);
  const auto& extension = at(entry).extension;
  return extension && extension->watched;
}

bool Entries::has_changed_if_watched(PlimsollEntry entry, const c10::StorageImpl& storage, bool ends_watch) {
  std::optional<uint64_t> watched;
  {
    Guard guard(mutex_);
    auto& extension = at(entry).extension;
    if (extension) watched = extension->watched;
    if (watched && ends_watch) {
      extension->watched.reset();
      watched_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  return watched && *watched != digest(storage);
}

void Entries::note_freed(PlimsollEntry entry) {
  // Its storage may live on, and get others there.
  slot(entry & ~kBeside).bytes.store(nullptr, std::memory_order_relaxed);
  if (entry & kBeside) return;
  Guard guard(freed_mutex_);
  freed_.push_back(entry);
  freed_count_.store(freed_.size(), std::memory_order_release);
}

size_t Entries::take_freed(PlimsollEntry* out, size_t capacity) {
  if (freed_count_.load(std::memory_order_acquire) == 0) return 0;
  Guard guard(freed_mutex_);
  size_t count = std::min(capacity, freed_.size());
  std::copy(freed_.begin(), freed_.begin() + count, out);
  if (count == freed_.size()) {
    freed_.clear();
  } else {
    freed_.erase(freed_.begin(), freed_.begin() + count);
  }
  freed_count_.store(freed_.size(), std::memory_order_release);
  return count;
}

void Entries::forget(PlimsollEntry entry) {
  at::DataPtr bytes;
  Guard guard(mutex_);
  Entry& kept = at(entry);
  if (kept.extension) bytes = take_parked(kept);
  clear(entry, kept);
}

void Entries::lock_for_fork() {
  mutex_.lock();
  freed_mutex_.lock();
}

void Entries::unlock_after_fork() {
  freed_mutex_.unlock();
  mutex_.unlock();
}

size_t Entries::bytes() {
  Guard guard(mutex_);
  size_t bytes = (taken_numbers_ + kChunk - 1) / kChunk * kChunk * sizeof(Entry);
  bytes += vacant_.capacity() * sizeof(PlimsollEntry);
  bytes += listed_.size() * (sizeof(void*) * 4) + listed_.bucket_count() * sizeof(void*);
  for (PlimsollEntry entry = 1; entry <= taken_numbers_; ++entry) bytes += slot(entry).extension ? sizeof(Extension) : 0;
  return bytes;
}

}  // namespace plimsoll
