// NVML as a driver brings it, as much of it as is asked here. Environment variables make it answer otherwise:
// STUB_PROCESSES use the SM and STUB_REASONS hold the clock down, in the first STUB_WINDOWS windows;
// STUB_REFUSES names what it does not support; STUB_MIG: the UUID is that of a slice, whose handle can nothing.
#include <cstdlib>
#include <cstring>
#include <sys/time.h>

namespace {
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
struct Device {};
Device gpu, slice;
int windows = 0;  // each asks for processes since time 0 once

struct ProcessSample {
  unsigned pid;
  unsigned long long time_stamp;
  unsigned sm, memory, encoder, decoder;
};

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtol(text, nullptr, 0) : otherwise;
}

bool refuses(const char* what) {
  const char* text = std::getenv("STUB_REFUSES");
  return text && !std::strcmp(text, what);
}

bool troubled() { return windows <= setting("STUB_WINDOWS", 0); }

int answer(Device* device, const char* what, unsigned* place, unsigned value) {
  if (device != &gpu || refuses(what)) return NOT_SUPPORTED;
  *place = value;
  return SUCCESS;
}
}  // namespace

extern "C" {
int nvmlInitWithFlags(unsigned) {
  windows = 0;
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Device** device) {
  bool is_slice = setting("STUB_MIG", 0);
  *device = is_slice ? &slice : &gpu;
  return std::strncmp(uuid, is_slice ? "MIG-12ab" : "GPU-12ab", 8) ? NOT_FOUND : SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device* device, Device** parent) {
  *parent = &gpu;
  return device == &slice ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetClockInfo(Device* device, unsigned type, unsigned* clock) {
  return answer(device, "clock", clock, type == 1 ? 1980 : 1);
}

int nvmlDeviceGetPowerUsage(Device* device, unsigned* milliwatts) { return answer(device, "power", milliwatts, 651500); }

int nvmlDeviceGetTemperature(Device* device, unsigned, unsigned* degrees) {
  return answer(device, "temperature", degrees, 61);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device* device, unsigned long long* reasons) {
  *reasons = 4 | (troubled() ? setting("STUB_REASONS", 0) : 0);
  return device == &gpu ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetProcessUtilization(Device* device, ProcessSample* samples, unsigned* count, unsigned long long since) {
  if (device != &gpu || refuses("processes")) return NOT_SUPPORTED;
  if (samples == nullptr && since == 0) ++windows;
  *count = troubled() ? setting("STUB_PROCESSES", 1) : 1;
  if (samples == nullptr) return INSUFFICIENT_SIZE;
  timeval now;
  gettimeofday(&now, nullptr);
  for (unsigned number = 0; number < *count; ++number)
    samples[number] = {4000 + number, now.tv_sec * 1000000ull + now.tv_usec, 97, 40, 0, 0};
  return SUCCESS;
}
}
