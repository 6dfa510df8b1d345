// What comes before what on a late device, by the order of streams, marks and waits alone, whenever it happens to be done. Two that
// touch the same bytes, of which one writes, and neither has to come before the other: such a race ends the process.
#pragma once

#include "device.h"

#include <cstddef>

namespace stand_in {
namespace order {

// The stream is given something to do that reads these bytes, or writes them.
void touches(Stream* stream, const void* start, size_t bytes, bool writes, const char* what);
// A mark behind all that the stream was given.
void marks(const Event* event, Stream* stream);
void waits(Stream* stream, const Event* event);
// The host knows that it is done: whatever is asked for from now on comes after it.
void is_known(Stream* stream);
void is_known(const Event* event);
void all_is_known();

// Which streams wait for the default one, and it for them.
void adds(Stream* stream, bool blocking);

}  // namespace order
}  // namespace stand_in
