// A pretend accelerator: torch's PrivateUse1 backend over plain memory, for tests on machines that have no device.
//
// What is asynchronous on a device is asynchronous here. A stream is a thread with a queue of jobs, an event a
// ticket that such a thread punches, and a copy really happens later. So memory that is used again too early, a
// wait that is missing and a block that nothing guards show as wrong bytes, and what a driver would answer with a
// fault is counted as a violation.
//
// INVARIANT: a job holds raw pointers into memory of others, never a tensor. A reference of the job's own would
// keep alive what the program under test forgot to keep.

#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

// The registries of allocators behind `torch.accelerator.memory_allocated` and `empty_host_cache`.
#define HAS_ALLOCATOR_REGISTRIES (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9)

namespace {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using Clock = std::chrono::steady_clock;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
// Streams beside the default one. As CUDA's pool, which hands them out in turn.
constexpr c10::StreamId kPool = 32;
constexpr size_t kRounding = 512;
constexpr int kPoison = 0xCB;

// ---- What is counted, and what a test can set

enum Count {
  kCopiesToDevice,
  kBytesToDevice,
  kCopiesToHost,
  kBytesToHost,
  kCopiesOnDevice,
  kSnapshots,
  kSnapshotBytes,
  kPinnedBlocks,
  kPinnedBytes,
  kPinnedLiveBlocks,
  kPinnedLiveBytes,
  kRegistrations,
  kRegisteredBytes,
  kRegistrationsEver,
  kDeviceBlocks,
  kDeviceBytes,
  kDeviceBytesPeak,
  kDeviceReservedBytes,
  kDeviceAllocations,
  kDeviceCpuNs,
  kFallbacks,
  kViolations,
  kCounts,
};

constexpr const char* kCountNames[kCounts] = {
    "copies_to_device",
    "bytes_to_device",
    "copies_to_host",
    "bytes_to_host",
    "copies_on_device",
    // Copies out of memory that is not page-locked: the driver reads it before the call returns.
    "snapshots",
    "snapshot_bytes",
    // Page-locked memory taken from the system, and how much of it is handed out.
    "pinned_blocks",
    "pinned_bytes",
    "pinned_live_blocks",
    "pinned_live_bytes",
    "registrations",
    "registered_bytes",
    "registrations_ever",
    // Handed out or withheld for a stream that still uses it.
    "device_blocks",
    "device_bytes",
    "device_bytes_peak",
    "device_reserved_bytes",
    "device_allocations",
    // Processor time of the streams' threads, which on a real device no processor spends.
    "device_cpu_ns",
    "fallbacks",
    "violations",
};

// The calls that fail: `times` of them (-1: all), after `before` that succeed.
struct Fault {
  int64_t before = 0;
  int64_t times = 0;

  bool strikes() {
    if (times == 0 || before-- > 0) {
      return false;
    }
    before = 0;
    times -= times > 0;
    return true;
  }
};

struct Ticket {
  std::atomic<bool> done{false};
  Clock::time_point when;
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Job {
  TicketPtr after;
  std::function<void()> work;
  TicketPtr ticket;
};

struct Queue {
  std::condition_variable more;
  std::deque<Job> jobs;
  TicketPtr last;
};

struct Block {
  char* data;
  size_t size;
  Stream owner;
  // What `record_stream` named beside the owner, and after the release the tickets of these streams.
  std::set<std::pair<DeviceIndex, c10::StreamId>> users;
  std::vector<TicketPtr> withheld_by;
};

// Everything that is shared, under one lock, so that a fork finds it in order.
struct World {
  std::mutex mutex;
  std::condition_variable done;
  std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;
  c10::StreamId next_stream[kDevices] = {};

  std::map<std::tuple<DeviceIndex, c10::StreamId, size_t>, std::vector<Block*>> free_blocks;
  std::vector<Block*> withheld;
  // Page-locked: start and size. Blocks of the pinned allocator, and what was registered in place.
  std::map<uintptr_t, size_t> pinned;
  std::map<uintptr_t, size_t> registered;

  Fault allocation, pinning, copy, registration;
  std::vector<std::string> violations;
  std::atomic<int64_t> delay_low{0}, delay_high{0};
  std::atomic<uint64_t> random{0};
  std::atomic<bool> poison{false};
  // Planted: copies do not tell torch's host allocator of the blocks that they use.
  std::atomic<bool> unguarded{false};
  std::atomic<bool> initialised{false};
  // In a child of a process that had initialised the device: no thread of a stream came along.
  std::atomic<bool> bad_fork{false};
  std::atomic<int64_t> counts[kCounts] = {};
};

// Never destroyed: the threads of the streams outlive every static.
World& world() {
  static World& the = *new World;
  return the;
}

using Lock = std::unique_lock<std::mutex>;

void count(Count which, int64_t by = 1) {
  world().counts[which] += by;
}

void violate(const std::string& what) {
  count(kViolations);
  Lock lock(world().mutex);
  if (world().violations.size() < 100) {
    world().violations.push_back(what);
  }
}

void initialise() {
  TORCH_CHECK(
      !world().bad_fork,
      "Cannot re-initialize pretend in forked subprocess. To use pretend with multiprocessing, "
      "you must use the 'spawn' start method");
  world().initialised = true;
}

// ---- Streams and events

int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

void run_queue(Queue& queue) {
  int64_t counted = 0;
  Lock lock(world().mutex);
  while (true) {
    queue.more.wait(lock, [&] { return !queue.jobs.empty(); });
    Job job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    if (job.after) {
      world().done.wait(lock, [&] { return job.after->done.load(); });
    }
    if (job.work) {
      lock.unlock();
      job.work();
      // What the job held goes before its ticket says that the job is over.
      job.work = nullptr;
      lock.lock();
    }
    int64_t spent = thread_cpu_ns();
    world().counts[kDeviceCpuNs] += spent - counted;
    counted = spent;
    job.ticket->when = Clock::now();
    job.ticket->done = true;
    world().done.notify_all();
  }
}

// The program's signal handlers are for its own threads.
void start_thread(Queue& queue) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(run_queue, std::ref(queue)).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TicketPtr submit_locked(const Stream& stream, std::function<void()> work, TicketPtr after = nullptr) {
  auto [at, fresh] = world().queues.try_emplace({stream.device_index(), stream.id()});
  Queue& queue = at->second;
  if (fresh) {
    start_thread(queue);
  }
  queue.last = std::make_shared<Ticket>();
  queue.jobs.push_back({std::move(after), std::move(work), queue.last});
  queue.more.notify_one();
  return queue.last;
}

TicketPtr submit(const Stream& stream, std::function<void()> work = nullptr, TicketPtr after = nullptr) {
  initialise();
  Lock lock(world().mutex);
  return submit_locked(stream, std::move(work), std::move(after));
}

void wait_for(const TicketPtr& ticket) {
  if (ticket && !ticket->done && !world().bad_fork) {
    Lock lock(world().mutex);
    world().done.wait(lock, [&] { return ticket->done.load(); });
  }
}

TicketPtr last_ticket(const Stream& stream) {
  Lock lock(world().mutex);
  auto at = world().queues.find({stream.device_index(), stream.id()});
  return at == world().queues.end() ? nullptr : at->second.last;
}

// -1: of every device.
void synchronise_device(DeviceIndex device) {
  std::vector<TicketPtr> tickets;
  {
    Lock lock(world().mutex);
    for (auto& [key, queue] : world().queues) {
      if (device == -1 || key.first == device) {
        tickets.push_back(queue.last);
      }
    }
  }
  for (auto& ticket : tickets) {
    wait_for(ticket);
  }
}

struct Event {
  TicketPtr ticket;
};

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};

DeviceIndex checked(DeviceIndex index) {
  TORCH_CHECK(index < kDevices, "pretend error: invalid device ordinal");
  return index < 0 ? current_device : index;
}

Stream make_stream(DeviceIndex device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, Device(kType, device), id);
}

Stream current_stream(DeviceIndex device) {
  return make_stream(device, current_streams[device]);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kType, current_device);
  }
  void setDevice(Device device) const override {
    current_device = checked(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index() < 0 || device.index() >= kDevices ? current_device : device.index();
  }
  // 2.6 declares this one and `exchangeStream` noexcept.
  Stream getStream(Device device) const noexcept override {
    return current_stream(device.index() < 0 ? current_device : device.index());
  }
  Stream getDefaultStream(Device device) const override {
    return make_stream(checked(device.index()), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool /*high_priority*/ = false) const override {
    DeviceIndex index = checked(device.index());
    Lock lock(world().mutex);
    return make_stream(index, 1 + world().next_stream[index]++ % kPool);
  }
  Stream getNewStream(Device device, int /*priority*/ = 0) const override {
    return getStreamFromGlobalPool(device);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  void destroyEvent(void* event, DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex /*device*/, c10::EventFlag /*flag*/)
      const override {
    if (!*event) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->ticket = submit(stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event && !queryEvent(event)) {
      submit(stream, nullptr, static_cast<Event*>(event)->ticket);
    }
  }
  bool queryEvent(void* event) const override {
    TicketPtr ticket = event ? static_cast<Event*>(event)->ticket : nullptr;
    return !ticket || ticket->done;
  }
  void synchronizeEvent(void* event) const override {
    wait_for(event ? static_cast<Event*>(event)->ticket : nullptr);
  }
  double elapsedTime(void* from, void* to, DeviceIndex /*device*/) const override {
    TORCH_CHECK(from && to && queryEvent(from) && queryEvent(to), "pretend error: an event is not complete");
    auto span = static_cast<Event*>(to)->ticket->when - static_cast<Event*>(from)->ticket->when;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  bool queryStream(const Stream& stream) const override {
    TicketPtr ticket = last_ticket(stream);
    return !ticket || ticket->done;
  }
  void synchronizeStream(const Stream& stream) const override {
    wait_for(last_ticket(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronise_device(device);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Memory of the device: cached per stream, withheld for those that `record_stream` named

#if HAS_ALLOCATOR_REGISTRIES
using DeviceAllocatorBase = c10::DeviceAllocator;
#else
using DeviceAllocatorBase = c10::Allocator;
#endif

struct DeviceMemory final : DeviceAllocatorBase {
  DataPtr allocate(size_t size) override {
    initialise();
    DeviceIndex device = current_device;
    if (size == 0) {
      return {nullptr, nullptr, &release, Device(kType, device)};
    }
    Block* block = take(current_stream(device), (size + kRounding - 1) / kRounding * kRounding);
    return {block->data, block, &release, Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* dest, const void* src, size_t size) const override {
    synchronise_device(-1);
    std::memcpy(dest, src, size);
  }

  static Block* take(Stream stream, size_t size) {
    Lock lock(world().mutex);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        !world().allocation.strikes(),
        "pretend out of memory. Tried to allocate ",
        size,
        " bytes. Device ",
        static_cast<int>(stream.device_index()));
    collect_locked();
    count(kDeviceAllocations);
    auto& cached = world().free_blocks[{stream.device_index(), stream.id(), size}];
    Block* block = nullptr;
    if (cached.empty()) {
      void* data = nullptr;
      TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&data, kRounding, size) == 0, "pretend out of memory");
      count(kDeviceReservedBytes, static_cast<int64_t>(size));
      block = new Block{static_cast<char*>(data), size, stream, {}, {}};
    } else {
      block = cached.back();
      cached.pop_back();
    }
    count(kDeviceBlocks);
    count(kDeviceBytes, static_cast<int64_t>(size));
    world().counts[kDeviceBytesPeak] =
        std::max(world().counts[kDeviceBytesPeak].load(), world().counts[kDeviceBytes].load());
    return block;
  }

  static void release(void* context) {
    // A child owns neither the block nor the threads that would have to be asked.
    if (!context || world().bad_fork) {
      return;
    }
    auto* block = static_cast<Block*>(context);
    Lock lock(world().mutex);
    for (auto [device, id] : block->users) {
      block->withheld_by.push_back(submit_locked(make_stream(device, id), nullptr));
    }
    block->users.clear();
    world().withheld.push_back(block);
    collect_locked();
  }

  // What no stream withholds goes back to its owner's cache.
  static void collect_locked() {
    std::vector<Block*> still;
    for (Block* block : world().withheld) {
      bool over = std::all_of(
          block->withheld_by.begin(), block->withheld_by.end(), [](auto& ticket) { return ticket->done.load(); });
      if (!over) {
        still.push_back(block);
        continue;
      }
      block->withheld_by.clear();
      count(kDeviceBlocks, -1);
      count(kDeviceBytes, -static_cast<int64_t>(block->size));
      if (world().poison) {
        // The next owner writes in the order of this stream: so does the poison.
        submit_locked(block->owner, [=] { std::memset(block->data, kPoison, block->size); });
      }
      world().free_blocks[{block->owner.device_index(), block->owner.id(), block->size}].push_back(block);
    }
    world().withheld.swap(still);
  }

  static void record(const DataPtr& data, const Stream& stream) {
    auto* block = static_cast<Block*>(data.get_context());
    TORCH_CHECK(!block || data.get_deleter() == &release, "record_stream: memory of another allocator");
    if (block && !(stream == block->owner)) {
      Lock lock(world().mutex);
      block->users.insert({stream.device_index(), stream.id()});
    }
  }

  static void empty_cache() {
    synchronise_device(-1);
    Lock lock(world().mutex);
    collect_locked();
    for (auto& [key, blocks] : world().free_blocks) {
      for (Block* block : blocks) {
        // Poison that was queued just now still writes here.
        submit_locked(block->owner, [block] {
          std::free(block->data);
          delete block;
        });
        count(kDeviceReservedBytes, -static_cast<int64_t>(block->size));
      }
      blocks.clear();
    }
  }

#if HAS_ALLOCATOR_REGISTRIES
  bool initialized() override {
    return world().initialised;
  }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    empty_cache();
  }
  void recordStream(const DataPtr& data, Stream stream) override {
    record(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex /*device*/) override {
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[all].current = world().counts[kDeviceBytes];
    stats.allocated_bytes[all].peak = world().counts[kDeviceBytesPeak];
    stats.reserved_bytes[all].current = world().counts[kDeviceReservedBytes];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex /*device*/) override {}
  void resetPeakStats(DeviceIndex /*device*/) override {
    world().counts[kDeviceBytesPeak] = world().counts[kDeviceBytes].load();
  }
#endif
};

DeviceMemory& device_memory() {
  static DeviceMemory& the = *new DeviceMemory;
  return the;
}

// ---- Page-locked memory: torch's own caching host allocator over malloc, and what is registered in place

// Whether one page-locked range holds all `size` bytes: a device takes no copy across two.
bool page_locked(const std::map<uintptr_t, size_t>& ranges, const void* data, size_t size) {
  auto start = reinterpret_cast<uintptr_t>(data);
  auto at = ranges.upper_bound(start);
  return at != ranges.begin() && (--at, start + size <= at->first + at->second);
}

bool page_locked(const void* data, size_t size) {
  Lock lock(world().mutex);
  return page_locked(world().pinned, data, size) || page_locked(world().registered, data, size);
}

// Rounding, reuse and the events that guard a block are torch's code.
struct PinnedBlocks final : at::CachingHostAllocatorImpl<Stream, TicketPtr> {
  using Base = at::CachingHostAllocatorImpl<Stream, TicketPtr>;
  using HostBlock = at::HostBlock<Stream>;

  std::pair<void*, void*> allocate(size_t size) override {
    initialise();
    {
      Lock lock(world().mutex);
      TORCH_CHECK(!world().pinning.strikes(), "pretend error: out of page-locked memory");
    }
    auto result = Base::allocate(size);
    if (auto* block = static_cast<HostBlock*>(result.second)) {
      count(kPinnedLiveBlocks);
      count(kPinnedLiveBytes, static_cast<int64_t>(block->size_));
      poison(*block);
    }
    return result;
  }

  void free(void* context) override {
    // Torch's locks may have been held when the process forked.
    if (!context || world().bad_fork) {
      return;
    }
    auto* block = static_cast<HostBlock*>(context);
    count(kPinnedLiveBlocks, -1);
    count(kPinnedLiveBytes, -static_cast<int64_t>(block->size_));
    if (block->streams_.empty()) {
      poison(*block);
    }
    Base::free(context);
  }

 private:
  static void poison(HostBlock& block) {
    if (world().poison) {
      std::memset(block.ptr_, kPoison, block.size_);
    }
  }

  void allocate_host_memory(size_t size, void** data) override {
    TORCH_CHECK(posix_memalign(data, kRounding, size) == 0, "pretend error: out of page-locked memory");
    count(kPinnedBlocks);
    count(kPinnedBytes, static_cast<int64_t>(size));
    Lock lock(world().mutex);
    world().pinned[reinterpret_cast<uintptr_t>(*data)] = size;
  }
  void free_block(HostBlock* block) override {
    count(kPinnedBlocks, -1);
    count(kPinnedBytes, -static_cast<int64_t>(block->size_));
    {
      Lock lock(world().mutex);
      world().pinned.erase(reinterpret_cast<uintptr_t>(block->ptr_));
    }
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<TicketPtr>>& events, Stream stream) override {
    events->push_back(submit(stream));
  }
  bool query_event(TicketPtr& ticket) override {
    return ticket->done;
  }
  // Functions that override nothing in torch before 2.11.
  virtual Stream get_current_stream() const {
    return current_stream(current_device);
  }
  virtual bool stream_is_capturing(Stream /*stream*/) const {
    return false;
  }
};

void release_pinned(void* context);

#if HAS_ALLOCATOR_REGISTRIES
using PinnedMemory = at::CachingHostAllocatorInterface<PinnedBlocks, release_pinned>;
#else
struct PinnedMemory final : at::CachingHostAllocatorInterface<PinnedBlocks> {
  DataPtr allocate(size_t size) override {
    auto [data, context] = impl_->allocate(size);
    return {data, context, &release_pinned, c10::DeviceType::CPU};
  }
};
#endif

PinnedMemory& pinned_memory() {
  static PinnedMemory& the = *new PinnedMemory;
  return the;
}

void release_pinned(void* context) {
  pinned_memory().free(context);
}

void host_register(int64_t data, int64_t size) {
  initialise();
  // Before that, 2.15 reports nothing as pinned.
  at::globalContext().lazyInitDevice(kType);
  auto start = static_cast<uintptr_t>(data);
  auto bytes = static_cast<size_t>(size);
  TORCH_CHECK(data > 0 && size > 0, "pretend error: invalid argument");
  Lock lock(world().mutex);
  TORCH_CHECK(!world().registration.strikes(), "pretend error: registration refused");
  for (auto* ranges : {&world().pinned, &world().registered}) {
    auto next = ranges->lower_bound(start + bytes);
    bool overlap = next != ranges->begin() && (--next, next->first + next->second > start);
    TORCH_CHECK(!overlap, "pretend error: part or all of the requested memory range is already mapped");
  }
  // The driver takes a reference on every page, and so every page comes to be.
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto first = start / page * page;
  int failed = madvise(reinterpret_cast<void*>(first), start + bytes - first, MADV_POPULATE_WRITE);
  TORCH_CHECK(failed == 0 || errno == EINVAL, "pretend error: invalid argument: ", std::strerror(errno));
  world().registered[start] = bytes;
  count(kRegistrations);
  count(kRegistrationsEver);
  count(kRegisteredBytes, size);
}

void host_unregister(int64_t data) {
  initialise();
  Lock lock(world().mutex);
  auto at = world().registered.find(static_cast<uintptr_t>(data));
  TORCH_CHECK(at != world().registered.end(), "pretend error: pointer does not correspond to a registered memory region");
  count(kRegistrations, -1);
  count(kRegisteredBytes, -static_cast<int64_t>(at->second));
  world().registered.erase(at);
}

// MIRRORS: `resize_bytes_cuda` in torch's ATen/native/cuda/Resize.cpp: on the current stream.
void resize_storage(const c10::Storage& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  DataPtr made = device_memory().allocate(size);
  size_t kept = std::min(size, storage.nbytes());
  if (kept > 0) {
    void *to = made.get(), *from = storage.data_ptr().get();
    submit(current_stream(current_device), [=] { std::memcpy(to, from, kept); });
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(made));
  impl->set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const {
    return true;
  }
  bool isAvailable() const {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override {
    return world().initialised;
  }
  void init() const override {
    initialise();
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    current_device = checked(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, checked(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  bool isPinnedPtr(const void* data) const override {
    return data && page_locked(data, 1);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

// ---- Copies

// Set while an operator of the CPU stands in for a kernel: the copies around it are none of the program's.
thread_local bool standing_in = false;

int64_t draw_delay() {
  int64_t low = world().delay_low, high = world().delay_high;
  if (standing_in || high <= low) {
    return standing_in ? 0 : low;
  }
  uint64_t bits = (world().random += 0x9E3779B97F4A7C15);
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  return low + static_cast<int64_t>((bits ^ (bits >> 31)) % static_cast<uint64_t>(high - low + 1));
}

// Drawn when the job is submitted, so that a test can set another one for the next copy.
std::function<void()> delayed(std::function<void()> work) {
  int64_t delay = draw_delay();
  return [delay, work = std::move(work)] {
    if (delay > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    work();
  };
}

// Through the kernel, so that memory that is no longer there is found out and not died of.
bool reach(bool read, void* device, void* host, size_t size) {
  while (size > 0) {
    iovec here{device, size}, there{host, size};
    ssize_t moved = (read ? process_vm_readv : process_vm_writev)(getpid(), &here, 1, &there, 1, 0);
    if (moved < 0 && (errno == EPERM || errno == ENOSYS)) {
      std::memcpy(read ? device : host, read ? host : device, size);
      return true;
    }
    if (moved <= 0) {
      return false;
    }
    device = static_cast<char*>(device) + moved;
    host = static_cast<char*>(host) + moved;
    size -= static_cast<size_t>(moved);
  }
  return true;
}

// Whether the pages are those that were registered. A page that was given back meanwhile left the page table,
// while a device would go on with the old one.
bool pages_kept(const void* data, size_t size) {
  static const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto first = reinterpret_cast<uintptr_t>(data) / page;
  std::vector<uint64_t> entries((reinterpret_cast<uintptr_t>(data) + size - 1) / page - first + 1);
  auto bytes = static_cast<ssize_t>(entries.size() * sizeof(uint64_t));
  if (pread(pagemap, entries.data(), entries.size() * sizeof(uint64_t), static_cast<off_t>(first * 8)) != bytes) {
    return true;
  }
  constexpr uint64_t kPresentOrSwapped = 3ull << 62;
  return std::all_of(entries.begin(), entries.end(), [](uint64_t entry) { return entry & kPresentOrSwapped; });
}

void check_host(const char* what, const void* host, size_t size) {
  bool registered;
  {
    Lock lock(world().mutex);
    registered = page_locked(world().registered, host, size);
    if (!registered && page_locked(world().pinned, host, size)) {
      return;
    }
  }
  if (!registered) {
    violate(std::string(what) + " was page-locked when the copy was issued, and is not when it runs");
  } else if (!pages_kept(host, size)) {
    violate(std::string(what) + " lost pages while it was registered");
  }
}

TicketPtr copy_to_device(void* device, void* host, size_t size, const Stream& stream) {
  if (page_locked(host, size)) {
    return submit(stream, delayed([=] {
      check_host("the source", host, size);
      if (!reach(true, device, host, size)) {
        violate("the source is not mapped");
      }
    }));
  }
  auto snapshot = std::make_shared<std::vector<char>>(static_cast<char*>(host), static_cast<char*>(host) + size);
  if (!standing_in) {
    count(kSnapshots);
    count(kSnapshotBytes, static_cast<int64_t>(size));
  }
  return submit(stream, delayed([=] { std::memcpy(device, snapshot->data(), size); }));
}

TicketPtr copy_to_host(void* host, void* device, size_t size, const Stream& stream) {
  bool locked = page_locked(host, size);
  return submit(stream, delayed([=] {
    if (locked) {
      check_host("the destination", host, size);
    }
    if (!reach(false, device, host, size)) {
      violate("the destination is not mapped");
    }
  }));
}

// A tensor as a job may hold it.
struct Raw {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool conj, neg;

  explicit Raw(const at::Tensor& tensor)
      : data(tensor.data_ptr()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        conj(tensor.is_conj()),
        neg(tensor.is_neg()) {}

  at::Tensor tensor() const {
    at::Tensor made = at::from_blob(data, sizes, strides, at::TensorOptions(dtype));
    made._set_conj(conj);
    made._set_neg(neg);
    return made;
  }
};

TicketPtr copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  Stream source = current_stream(from.device().index());
  Stream target = current_stream(to.device().index());
  if (source != target) {
    submit(source, nullptr, submit(target));
  }
  TicketPtr ticket = submit(source, delayed([from = Raw(from), to = Raw(to)] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    to.tensor().copy_(from.tensor());
  }));
  if (source != target) {
    submit(target, nullptr, ticket);
  }
  return ticket;
}

// One job for all of them. Each pair is alike: dense, with the same strides and type.
void copy_many_on_device(at::TensorList to, at::TensorList from) {
  std::vector<std::tuple<void*, const void*, size_t>> copies;
  for (size_t at = 0; at < to.size(); ++at) {
    copies.emplace_back(to[at].data_ptr(), from[at].data_ptr(), to[at].nbytes());
  }
  submit(current_stream(to[0].device().index()), delayed([copies = std::move(copies)] {
    for (auto [target, source, size] : copies) {
      std::memcpy(target, source, size);
    }
  }));
}

bool same_bytes(const at::Tensor& one, const at::Tensor& other) {
  bool alike = one.scalar_type() == other.scalar_type() && one.is_conj() == other.is_conj() &&
      one.is_neg() == other.is_neg();
  return alike && ((one.is_contiguous() && other.is_contiguous()) ||
                   (one.is_non_overlapping_and_dense() && one.strides() == other.strides()));
}

// MIRRORS: `copy_kernel_cuda` in torch's ATen/native/cuda/Copy.cu, for what one memcpy does not do.
void copy_through_temporaries(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  constexpr auto kPlain = at::MemoryFormat::Contiguous;
  at::Tensor source, target;
  if (from.is_cpu() != non_blocking) {
    target = to.is_contiguous() ? to : at::empty_like(to, kPlain);
    source = from.to(to.scalar_type()).contiguous();
  } else {
    bool fits = to.is_contiguous() && to.scalar_type() == from.scalar_type();
    target = fits ? to : at::empty_like(to, to.options().dtype(from.scalar_type()), kPlain);
    source = from.contiguous();
  }
  target._set_conj(to.is_conj());
  source._set_conj(to.is_conj());
  target._set_neg(to.is_neg());
  source._set_neg(to.is_neg());
  if (from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg()) {
    source.copy_(from);
  }
  target.copy_(source, non_blocking);
  if (!target.is_same(to)) {
    to.copy_(target, non_blocking);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor from = self.sizes() == to.sizes() ? self : self.expand_as(to);
  if (from.numel() == 0 || from.is_same(to)) {
    return to;
  }
  if (!standing_in) {
    Lock lock(world().mutex);
    TORCH_CHECK(!world().copy.strikes(), "pretend error: copy failed");
  }
  bool up = from.is_cpu(), down = to.is_cpu();
  if (!up && !down) {
    if (!standing_in) {
      count(kCopiesOnDevice);
    }
    TicketPtr ticket = copy_on_device(from, to);
    if (!non_blocking && from.device() != to.device()) {
      wait_for(ticket);
    }
    return to;
  }
  c10::DeviceGuard guard(up ? to.device() : from.device());
  if (!same_bytes(from, to)) {
    copy_through_temporaries(from, to, non_blocking);
    return to;
  }
  Stream stream = current_stream(current_device);
  const at::Tensor& host = up ? from : to;
  const at::Tensor& device = up ? to : from;
  if (!standing_in) {
    count(up ? kCopiesToDevice : kCopiesToHost);
    count(up ? kBytesToDevice : kBytesToHost, static_cast<int64_t>(host.nbytes()));
  }
  TicketPtr ticket = (up ? copy_to_device : copy_to_host)(
      up ? device.data_ptr() : host.data_ptr(), up ? host.data_ptr() : device.data_ptr(), host.nbytes(), stream);
  if (non_blocking && page_locked(host.data_ptr(), host.nbytes())) {
    // As CUDA's copy does it: the tensor's address, and the context of its storage.
    if (!world().unguarded) {
      pinned_memory().record_event(host.data_ptr(), host.storage().data_ptr().get_context(), stream);
    }
  } else if (!non_blocking || down) {
    wait_for(ticket);
  }
  return to;
}

// MIRRORS: `can_use_fast_route` and the checks of `_foreach_copy_` in torch's ATen/native/cuda, for what one
// kernel copies.
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  TORCH_CHECK(!to.empty() && to.size() == from.size(), "_foreach_copy_: lists of one length, and not empty");
  bool together = true;
  for (size_t at = 0; at < to.size(); ++at) {
    together = together && to[at].device() == to[0].device() && from[at].device() == to[0].device() &&
        to[at].scalar_type() == to[0].scalar_type() && from[at].scalar_type() == to[0].scalar_type() &&
        to[at].sizes() == from[at].sizes() && to[at].strides() == from[at].strides() &&
        to[at].is_non_overlapping_and_dense();
  }
  if (!together) {
    for (size_t at = 0; at < to.size(); ++at) {
      to[at].copy_(from[at], non_blocking);
    }
    return;
  }
  {
    Lock lock(world().mutex);
    TORCH_CHECK(!world().copy.strikes(), "pretend error: copy failed");
  }
  count(kCopiesOnDevice);
  copy_many_on_device(to, from);
}

// ---- Operators

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kType, current_device)));
  return at::detail::empty_generic(
      size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kType, current_device)));
  return at::detail::empty_strided_generic(
      size,
      stride,
      &device_memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// MIRRORS: `resize_cuda_`, as above.
const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = at::detail::computeStorageNbytesContiguous(
      size, self.itemsize(), static_cast<size_t>(impl->storage_offset()));
  if (impl->numel() > 0 && needed > self.storage().nbytes()) {
    resize_storage(self.storage(), needed);
  }
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  resize(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Tensor& set_storage_range(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  // A range beyond the storage makes it larger. Without strides it is contiguous.
  auto first = static_cast<size_t>(offset);
  size_t needed = stride.data() == nullptr
      ? at::detail::computeStorageNbytesContiguous(size, self.itemsize(), first)
      : at::detail::computeStorageNbytes(size, stride, self.itemsize(), first);
  if (needed > storage.nbytes()) {
    resize_storage(storage, needed);
  }
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  return at::cpu::set_(self, std::move(storage));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return at::cpu::set_(self, other);
}

void record_stream(at::Tensor& self, Stream stream) {
  DeviceMemory::record(self.storage().data_ptr(), stream);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct StandingIn {
    bool before = std::exchange(standing_in, true);
    ~StandingIn() {
      standing_in = before;
    }
  } in_this_call;
  count(kFallbacks);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("_foreach_copy_", foreach_copy);
  m.impl("set_.source_Storage_storage_offset", set_storage_range);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

// ---- What tests call, as `torch.ops.pretend`

c10::Dict<std::string, int64_t> counters() {
  c10::Dict<std::string, int64_t> all;
  for (int which = 0; which < kCounts; ++which) {
    all.insert(kCountNames[which], world().counts[which].load());
  }
  return all;
}

// Those that count what happened; the others say what is there.
void reset_counters() {
  for (Count which : {kCopiesToDevice, kBytesToDevice, kCopiesToHost, kBytesToHost, kCopiesOnDevice, kSnapshots,
                      kSnapshotBytes, kRegistrationsEver, kDeviceAllocations, kDeviceCpuNs, kFallbacks,
                      kViolations}) {
    world().counts[which] = 0;
  }
  world().counts[kDeviceBytesPeak] = world().counts[kDeviceBytes].load();
  Lock lock(world().mutex);
  world().violations.clear();
}

std::vector<std::string> violations() {
  Lock lock(world().mutex);
  return world().violations;
}

void set_delay_range(int64_t low, int64_t high) {
  TORCH_CHECK(0 <= low && low <= high, "set_delay_range: 0 <= low <= high");
  world().delay_low = low;
  world().delay_high = high;
}

void fail(const std::string& what, int64_t nth, int64_t times) {
  World& w = world();
  std::map<std::string, Fault*> faults = {
      {"allocation", &w.allocation}, {"pinning", &w.pinning}, {"copy", &w.copy}, {"registration", &w.registration}};
  TORCH_CHECK(faults.count(what) && nth >= 1, "fail: allocation, pinning, copy or registration, from the 1st call on");
  Lock lock(w.mutex);
  *faults[what] = {nth - 1, times};
}

TORCH_LIBRARY(pretend, m) {
  m.def("counters", counters);
  m.def("reset_counters", reset_counters);
  m.def("violations", violations);
  m.def("set_delay_range", set_delay_range);
  m.def("set_seed", [](int64_t seed) { world().random = static_cast<uint64_t>(seed); });
  m.def("set_poison", [](bool on) { world().poison = on; });
  m.def("set_unguarded", [](bool on) { world().unguarded = on; });
  m.def("fail", fail);
  m.def("host_register", host_register);
  m.def("host_unregister", host_unregister);
  m.def("is_initialized", []() -> bool { return world().initialised && !world().bad_fork; });
  m.def("is_in_bad_fork", []() -> bool { return world().bad_fork; });
  m.def("empty_cache", [] { DeviceMemory::empty_cache(); });
  m.def("empty_host_cache", [] { pinned_memory().empty_cache(); });
  m.def("synchronize", [](int64_t device) { synchronise_device(static_cast<DeviceIndex>(device)); });
}

const bool registered_with_torch = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &device_memory());
#if HAS_ALLOCATOR_REGISTRIES
  at::setHostAllocator(kType, &pinned_memory());
#endif
  pthread_atfork(
      [] { world().mutex.lock(); },
      [] { world().mutex.unlock(); },
      [] {
        world().bad_fork = world().bad_fork || world().initialised;
        world().mutex.unlock();
      });
  return true;
}();

} // namespace
