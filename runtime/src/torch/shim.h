// The C interface between libtorch's dispatcher and Rust: mechanism only, no policy.
//
// An *entry* stands for one StorageImpl that an intercepted operator used or made. Entry numbers start at 1.
// Functions that can fail return 0 on success; plimsoll_error() then tells why not. What failed because an allocation was
// refused returns PLIMSOLL_NO_ROOM. No C++ exception passes: where it could not be told, it would end the process.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

typedef uint32_t PlimsollEntry;
typedef struct PlimsollRecipe PlimsollRecipe;

enum { PLIMSOLL_NO_ROOM = -2 };
enum PlimsollMode { PLIMSOLL_READ = 0, PLIMSOLL_WRITE = 1, PLIMSOLL_OVERWRITE = 2, PLIMSOLL_SIDE_EFFECT = 3 };
enum PlimsollFilled { PLIMSOLL_NOT_FILLED = 0, PLIMSOLL_FILLED = 1, PLIMSOLL_WAS_AWAY = 2 };
enum PlimsollPhase { PLIMSOLL_FORWARD = 0, PLIMSOLL_BACKWARD = 1, PLIMSOLL_UPDATE = 2 };

enum PlimsollWish { PLIMSOLL_RECIPE = 1, PLIMSOLL_WATCH = 2, PLIMSOLL_TIMES = 4 };

// One distinct storage among an operator's inputs.
typedef struct {
  PlimsollEntry entry;
  uint32_t mode;        // PlimsollMode
  uint64_t bytes;       // size of the storage now; 0 where the allocator does not count it
  const char* locked;   // why it may not be evicted, or null; static
  uint32_t filled;      // PlimsollFilled: whether a watched storage changed since it was made, with no operator in between
} PlimsollAccess;

// One storage that an operator made and returned.
typedef struct {
  PlimsollEntry entry;
  uint64_t bytes;
  const char* locked;
} PlimsollCreated;

// An operator about to run, or one that has run.
typedef struct {
  uint32_t name;                 // announced once through `name`
  const char* not_replayable;    // why it cannot be rerun bit for bit, or null; static
  const PlimsollAccess* accesses;
  size_t access_count;
  const PlimsollCreated* created;  // null before it has run
  size_t created_count;
  PlimsollRecipe* recipe;        // after it has run: the recipe that `before` asked for, now the callee's, or null
  uint64_t peak_bytes;           // after it has run: most bytes that it held at once beyond those it started with
  uint64_t start_ns, end_ns;     // after it has run, where `before` asked for times: monotonic clock around the operator
} PlimsollOperator;

// What Rust is told. All are called on the thread that runs the operator, with no lock held but that of random numbers, where the
// operator draws some (draws()). `before` returns a
// negative number to refuse the operator with the message of plimsoll_refuse(), else the sum of what it asks for:
// 1 for a recipe, 2 to watch what the operator makes from nothing, until it is used, for bytes filled in past the
// dispatcher, 4 for times. `pressure` is called on any thread where an allocation would exceed the line; it returns 0
// where it made room for so many bytes, else a negative number with the message of plimsoll_refuse(). `refused` is called
// where an allocation fits under the line and the device has no memory for it; it returns 1 where it gave bytes back, so
// many or all there were, 0 where there were none, else a negative number likewise. `before_bystander` is called in the stead of
// `before` where the thread is a bystander, with such accesses alone as have an entry; it returns 1 where `after_bystander` is to be
// called once the operator has run or failed, 0 where nobody listens, else a negative number likewise.
typedef struct {
  void (*name)(uint32_t name, const char* text);
  int32_t (*before)(const PlimsollOperator*);
  void (*after)(const PlimsollOperator*);
  void (*failed)(const PlimsollOperator*);
  int32_t (*pressure)(uint64_t bytes);
  int32_t (*refused)(uint64_t bytes);
  int32_t (*before_bystander)(const PlimsollOperator*);
  void (*after_bystander)(const PlimsollOperator*);
} PlimsollCallbacks;

// Registers the allocator and the interceptor, once per process: on the CPU, or, where `cuda_index` is not negative, on
// that CUDA device, which must be in use.
int32_t plimsoll_install(const PlimsollCallbacks* callbacks, int32_t cuda_index);

// What the caching allocator of a CUDA device counts itself; zeros where none is counted. Peaks since the last reset.
typedef struct {
  uint64_t allocated_now, allocated_peak, reserved_now, reserved_peak, failed, retried;
} PlimsollDeviceBytes;
void plimsoll_device_bytes(PlimsollDeviceBytes* out) noexcept;
void plimsoll_reset_device_peak(void) noexcept;
// Share of the device's memory that its caching allocator may take.
int32_t plimsoll_set_device_share(double share);
int32_t plimsoll_empty_device_cache(void);
// The current stream of this thread is used, or about to be, by operators that nobody may listen to.
int32_t plimsoll_note_stream(void);
// Whether a CUDA graph is being captured.
int32_t plimsoll_is_capturing(void) noexcept;
// What any stream that operators use, and the current one, is given from now on comes after all that each of them has been given. Fails
// where a graph is being captured.
int32_t plimsoll_join_streams(void);
// What a device is timed at from now on that works through its operators later, by its own clock.
typedef enum { PLIMSOLL_NO_TIMES, PLIMSOLL_MAKESPAN, PLIMSOLL_OPERATOR_TIMES } PlimsollDeviceTiming;
void plimsoll_time_on_device(int32_t timing) noexcept;
// What the device is given from now on is the runtime's, copies to wait for and reruns, until the next operator starts.
void plimsoll_device_interrupted(void) noexcept;
// Those times, in ns, of what was timed last, and from its start to its end. Waits for the device. `count` says how many there are,
// of which at most `capacity` are written.
typedef struct {
  uint64_t gap_ns;          // the pause before the operator, the first since the switch
  uint64_t interrupted_ns;  // what the runtime took
  uint64_t cost_ns;         // its own
} PlimsollDeviceTimes;
int32_t plimsoll_take_device_times(PlimsollDeviceTimes* out, size_t capacity, size_t* count, uint64_t* makespan_ns);
// Notes the storages that died without a report. To be called between iterations.
void plimsoll_find_dead(void) noexcept;
// Lets go of what libtorch keeps of a backward pass that has failed in an operator, if one has. To be called by the thread that began it,
// outside of any.
void plimsoll_forget_failed_backward(void) noexcept;
// What the operator that this thread runs is for: PlimsollPhase. Few need to know.
uint32_t plimsoll_phase(void) noexcept;
// How much autograd has recorded of this thread: more than before where it records the operator that is about to run.
uint64_t plimsoll_recorded(void) noexcept;
// Switches interception on or off for this thread, and for the autograd threads that work for it. One thread at a time. Where it comes
// on, waits for operators that bystanders have begun unheard.
void plimsoll_intercept(int32_t on) noexcept;
// This thread, and the autograd threads that work for it, are bystanders from now on, while it is not intercepted.
void plimsoll_stand_by(void) noexcept;
// This thread goes on with something that is no part of the operator that it is within, if it is within one, as a bystander: until
// plimsoll_step_back() is told how often it had stepped aside before.
void plimsoll_step_aside(void) noexcept;
size_t plimsoll_times_aside(void) noexcept;
void plimsoll_step_back(size_t times) noexcept;
// Whether the handler of that signal of Python's comes later, for this thread runs an operator again.
int32_t plimsoll_postpone(int32_t signal) noexcept;
// After a fork, in the child, which has no other threads.
void plimsoll_forget_bystanders(void) noexcept;
// Lets Python's other threads go on, if this one holds them up, until plimsoll_with_python() is given the result.
void* plimsoll_without_python(void) noexcept;
void plimsoll_with_python(void* state) noexcept;
// Takes the shim's locks before the process forks, and gives them back in both processes.
void plimsoll_before_fork(void) noexcept;
void plimsoll_after_fork(void) noexcept;

// What every operator is held to while a loop runs, by what its inputs and its results hold. Slow.
enum PlimsollAudit {
  PLIMSOLL_NO_AUDIT = 0,
  PLIMSOLL_AUDIT_EFFECTS = 1,  // whether it does what its schema does not say
  // Whether it makes the same bits of the same inputs, in two runs of the same program. Neither may be under a plan.
  PLIMSOLL_AUDIT_FIRST_RUN = 2,
  PLIMSOLL_AUDIT_SECOND_RUN = 3,
};
void plimsoll_audit(int32_t what) noexcept;
// How many findings there were since the last call; their descriptions, one a line, are cut off at `capacity`.
size_t plimsoll_take_audit_findings(char* out, size_t capacity) noexcept;

const char* plimsoll_error(void) noexcept;
void plimsoll_refuse(const char* message) noexcept;

// Device bytes: allocated now; most since the last call of plimsoll_reset_peak().
uint64_t plimsoll_live_bytes(void) noexcept;
uint64_t plimsoll_peak_bytes(void) noexcept;
void plimsoll_reset_peak(void) noexcept;
// Device bytes that no allocation may exceed; UINT64_MAX for none. Over them `pressure` is called.
void plimsoll_set_line(uint64_t bytes) noexcept;
// What an operator on lists may use without being run in pieces, where it can be; UINT64_MAX for anything.
void plimsoll_set_piece(uint64_t bytes) noexcept;

// Kernels that give the same bits in every run: not asked for; preferred, with a warning where there are none; required.
enum PlimsollDeterminism { PLIMSOLL_ANY_KERNELS = 0, PLIMSOLL_PREFER_DETERMINISTIC = 1, PLIMSOLL_REQUIRE_DETERMINISTIC = 2 };
void plimsoll_set_deterministic(int32_t how) noexcept;
// Mixed precision in bfloat16 for operators of this thread, on a CUDA device or on the CPU.
void plimsoll_autocast(int32_t on_cuda, int32_t on) noexcept;

// Moves at most `capacity` entries whose storage has died since the last call into `out`; returns how many. Their
// numbers stay taken until plimsoll_forget().
size_t plimsoll_take_freed(PlimsollEntry* out, size_t capacity) noexcept;
void plimsoll_forget(PlimsollEntry entry) noexcept;
// Why a storage may not be evicted any more whose address somebody has asked for; null of any other.
const char* plimsoll_lent(PlimsollEntry entry) noexcept;
// The entry of a tensor's storage, or 0 where no intercepted operator has seen it. `tensor` is an at::Tensor*.
PlimsollEntry plimsoll_entry_of(const void* tensor) noexcept;

// Whether the bytes of a storage that is being watched, and has its bytes, were filled in past the dispatcher.
int32_t plimsoll_is_filled(PlimsollEntry entry, int32_t ends_watch, int32_t* filled);
// Takes the bytes out of the storage, which then has none; the entry keeps them.
int32_t plimsoll_park(PlimsollEntry entry, void** bytes);
// Puts the bytes that the entry keeps into the storage.
int32_t plimsoll_unpark(PlimsollEntry entry);
// Frees the bytes that the entry keeps.
int32_t plimsoll_release(PlimsollEntry entry);
// Allocates bytes for the entry to keep.
int32_t plimsoll_allocate(PlimsollEntry entry, void** bytes);
// Keeps the storage alive, whatever the program does, until plimsoll_unhold().
int32_t plimsoll_hold(PlimsollEntry entry);
int32_t plimsoll_unhold(PlimsollEntry entry);
// Whether nothing but plimsoll_hold() keeps the storage alive: the program has let go of it.
int32_t plimsoll_is_orphan(PlimsollEntry entry, int32_t* orphan);
// The size of the storage now.
int32_t plimsoll_bytes_of(PlimsollEntry entry, uint64_t* bytes);

// Reruns an operator. `inputs` has one entry for each access of the original: the storage that holds the version
// it read; ignored for PLIMSOLL_OVERWRITE and PLIMSOLL_SIDE_EFFECT. On success `outputs` receives first one entry
// for each access that was written (other than as a side effect), then one for each storage that was created.
// Entries made here stand beside the program: they live until plimsoll_discard() or plimsoll_adopt().
int32_t plimsoll_rerun(PlimsollRecipe* recipe, const PlimsollEntry* inputs, size_t input_count,
                       PlimsollEntry* outputs, size_t output_count);
// A recipe has one owner more; each of them frees it.
void plimsoll_recipe_share(PlimsollRecipe* recipe) noexcept;
void plimsoll_recipe_free(PlimsollRecipe* recipe) noexcept;
// Bytes that a recipe takes.
size_t plimsoll_recipe_bytes(const PlimsollRecipe* recipe) noexcept;
// Bytes that the table of entries takes, storages that have died since included.
size_t plimsoll_entry_bytes(void) noexcept;
// Moves the bytes of `from`, which stands beside the program, into the empty storage of `to`; `from` is gone.
int32_t plimsoll_adopt(PlimsollEntry from, PlimsollEntry to);
// Frees an entry that stands beside the program, and its bytes.
int32_t plimsoll_discard(PlimsollEntry entry);

}  // extern "C"
