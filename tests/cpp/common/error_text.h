// What an error says, for tests that look for several things in one message.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace polyreme::testing {

// The message of the `Exception` that `statement` throws; a text that says so if it throws none.
template <typename Exception, typename Statement>
std::string error_text(Statement&& statement) {
  try {
    statement();
  } catch (const Exception& error) {
    return error.what();
  }
  return "(no error of the expected type)";
}

inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

}  // namespace polyreme::testing
