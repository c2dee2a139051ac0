// Checks for native tests: a test is a function, a failed check ends the process with file and
// line.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

#define CHECK_EQ(got, expected)                                                              \
  do {                                                                                       \
    const auto got_value = (got);                                                            \
    const auto expected_value = (expected);                                                  \
    if (!(got_value == expected_value)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s is %s, %s expected\n", __FILE__, __LINE__, #got,       \
                   strata::Shown(got_value).c_str(), strata::Shown(expected_value).c_str()); \
      std::_Exit(1);                                                                         \
    }                                                                                        \
  } while (false)

#define CHECK_CONTAINS(text, part)                                                        \
  do {                                                                                    \
    const std::string checked_text = (text);                                              \
    if (checked_text.find(part) == std::string::npos) {                                   \
      std::fprintf(stderr, "%s:%d: \"%s\" does not contain \"%s\"\n", __FILE__, __LINE__, \
                   checked_text.c_str(), std::string(part).c_str());                      \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (false)

#define RUN(test)               \
  do {                          \
    std::printf("%s\n", #test); \
    std::fflush(stdout);        \
    test();                     \
  } while (false)

namespace strata {

inline std::string Shown(const std::string& value) { return '"' + value + '"'; }
inline std::string Shown(const char* value) { return Shown(std::string(value)); }
template <typename Number>
std::string Shown(Number value) {
  return std::to_string(value);
}

}  // namespace strata
