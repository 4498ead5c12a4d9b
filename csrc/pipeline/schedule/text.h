#pragma once

#include <string>
#include <string_view>

#include "pipeline/schedule/schedule.h"

namespace polyreme::pipeline {

// The largest text that is read.
inline constexpr size_t kMaxTextBytes = size_t{1} << 26;

// The text form (README.md, "Text"): a header, and one line of tokens for each rank.
std::string to_text(const Schedule& schedule);

// Reads the text form. The result is well-formed, not yet valid (validate.h). Throws InvalidArgument naming
// line and token.
Schedule from_text(std::string_view text);

}  // namespace polyreme::pipeline
