#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace polyreme {

// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). Our own because the extension must load on any
// Linux: libcrypto differs in its soname between distributions and the kernel's AF_ALG is often
// switched off in containers. Only short messages, once per connection.
using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);
// Takes the same time wherever the first difference lies.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace polyreme
