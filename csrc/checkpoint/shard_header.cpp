#include "checkpoint/shard_header.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/error.h"

namespace polyreme {
namespace {

constexpr int kMaxDims = 16;

struct DtypeRow {
  const char* name;
  int64_t size_bytes;
};
constexpr std::array<DtypeRow, 15> kDtypes = {{{"BOOL", 1},
                                               {"U8", 1},
                                               {"I8", 1},
                                               {"F8_E5M2", 1},
                                               {"F8_E4M3", 1},
                                               {"I16", 2},
                                               {"U16", 2},
                                               {"F16", 2},
                                               {"BF16", 2},
                                               {"I32", 4},
                                               {"U32", 4},
                                               {"F32", 4},
                                               {"F64", 8},
                                               {"I64", 8},
                                               {"U64", 8}}};

void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      constexpr const char* kHex = "0123456789abcdef";
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

// The length of the UTF-8 sequence at the start of `text` (RFC 3629), or 0 if there is none.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto follows = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return text.empty() ? 0 : 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool second = first == 0xe0   ? follows(1, 0xa0)
                        : first == 0xed ? follows(1, 0x80, 0x9f)
                                        : follows(1);
    return second && follows(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool second = first == 0xf0   ? follows(1, 0x90)
                        : first == 0xf4 ? follows(1, 0x80, 0x8f)
                                        : follows(1);
    return second && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

void append_utf8(std::string& out, uint32_t code) {
  const auto push = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) {
    push(code);
  } else if (code < 0x800) {
    push(0xc0 | code >> 6);
    push(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    push(0xe0 | code >> 12);
    push(0x80 | (code >> 6 & 0x3f));
    push(0x80 | (code & 0x3f));
  } else {
    push(0xf0 | code >> 18);
    push(0x80 | (code >> 12 & 0x3f));
    push(0x80 | (code >> 6 & 0x3f));
    push(0x80 | (code & 0x3f));
  }
}

// The part of JSON that headers consist of: objects, strings, arrays of numbers.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  ShardHeader header() {
    ShardHeader result;
    std::set<std::string> names;
    object([&](const std::string& name) {
      check(names.insert(name).second, "a name twice");
      if (name == "__metadata__")
        metadata(result);
      else
        result.entries.push_back(entry(name));
    });
    check(at_ == text_.size(), "nothing after the object");
    return result;
  }

 private:
  void metadata(ShardHeader& header) {
    object([&](const std::string& key) {
      check(header.metadata.emplace(key, string()).second, "a name twice in __metadata__");
    });
  }

  ShardEntry entry(const std::string& name) {
    ShardEntry result{.name = name};
    std::set<std::string> keys;
    object([&](const std::string& key) {
      check(keys.insert(key).second, "a key twice");
      if (key == "dtype") {
        result.dtype = string();
      } else if (key == "shape") {
        result.shape = numbers(kMaxDims);
      } else if (key == "data_offsets") {
        const std::vector<int64_t> offsets = numbers(2);
        check(offsets.size() == 2, "two data_offsets");
        result.begin = offsets[0];
        result.end = offsets[1];
      } else {
        check(false, "dtype, shape and data_offsets");
      }
    });
    check(keys.size() == 3, "dtype, shape and data_offsets");
    return result;
  }

  template <typename Member>
  void object(const Member& member) {
    take('{');
    if (try_take('}')) return;
    do {
      const std::string name = string();
      take(':');
      member(name);
    } while (try_take(','));
    take('}');
  }

  std::vector<int64_t> numbers(int limit) {
    std::vector<int64_t> result;
    take('[');
    if (try_take(']')) return result;
    do {
      check(static_cast<int>(result.size()) < limit, "fewer numbers");
      result.push_back(number());
    } while (try_take(','));
    take(']');
    return result;
  }

  int64_t number() {
    skip_space();
    const size_t start = at_;
    int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      check(value < (int64_t{1} << 59), "a smaller number");
      value = value * 10 + (text_[at_++] - '0');
    }
    check(at_ > start, "a number that is not negative");
    check(text_[start] != '0' || at_ == start + 1, "a number without leading zeros");
    return value;
  }

  std::string string() {
    take('"');
    std::string result;
    for (;;) {
      check(at_ < text_.size(), "the end of a string");
      const auto byte = static_cast<unsigned char>(text_[at_]);
      if (byte == '"') break;
      check(byte >= 0x20, "no control characters in a string");
      if (byte == '\\') {
        ++at_;
        escape(result);
        continue;
      }
      const size_t length = utf8_length(text_.substr(at_));
      check(length > 0, "UTF-8");
      result.append(text_.substr(at_, length));
      at_ += length;
    }
    ++at_;
    return result;
  }

  void escape(std::string& out) {
    check(at_ < text_.size(), "an escape");
    const char c = text_[at_++];
    constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (const size_t place = kFrom.find(c); place != std::string_view::npos) {
      out += kTo[place];
      return;
    }
    check(c == 'u', "an escape");
    uint32_t code = hex4();
    check(code < 0xdc00 || code > 0xdfff, "a surrogate pair");
    if (code >= 0xd800 && code <= 0xdbff) {
      check(text_.substr(at_, 2) == "\\u", "a surrogate pair");
      at_ += 2;
      const uint32_t low = hex4();
      check(low >= 0xdc00 && low <= 0xdfff, "a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(out, code);
  }

  uint32_t hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      check(at_ < text_.size(), "four hexadecimal digits");
      const char c = text_[at_++];
      const bool digit = c >= '0' && c <= '9', lower = c >= 'a' && c <= 'f', upper = c >= 'A' && c <= 'F';
      check(digit || lower || upper, "four hexadecimal digits");
      value = value * 16 + static_cast<uint32_t>(c - (digit ? '0' : lower ? 'a' - 10 : 'A' - 10));
    }
    return value;
  }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos)
      ++at_;
  }
  bool try_take(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    skip_space();
    return true;
  }
  void take(char c) {
    skip_space();
    check(at_ < text_.size() && text_[at_] == c, concat("'", c, "'").c_str());
    ++at_;
    if (c != '"') skip_space();
  }
  void check(bool holds, const char* expected) const {
    require<CheckpointCorrupt>(holds, "the header is damaged at its byte ", at_, ": expected ", expected);
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Elements times item size, or -1 if that is no size of data.
int64_t size_of(const ShardEntry& entry, int64_t data_bytes) {
  for (const int64_t extent : entry.shape)
    if (extent == 0) return 0;
  int64_t size = shard_dtype_size(entry.dtype);
  for (const int64_t extent : entry.shape) {
    if (extent > data_bytes / size) return -1;
    size *= extent;
  }
  return size;
}

}  // namespace

int64_t shard_dtype_size(const std::string& dtype) {
  for (const DtypeRow& row : kDtypes)
    if (dtype == row.name) return row.size_bytes;
  throw CheckpointCorrupt(
      concat("the header has the dtype '", dtype.substr(0, 40), "', which the format has not"));
}

std::string encode_shard_header(const ShardHeader& header) {
  std::string out = "{\"__metadata__\":{";
  bool first = true;
  for (const auto& [key, value] : header.metadata) {
    if (!first) out += ',';
    first = false;
    append_quoted(out, key);
    out += ':';
    append_quoted(out, value);
  }
  out += '}';
  for (const ShardEntry& entry : header.entries) {
    out += ',';
    append_quoted(out, entry.name);
    out += ":{\"dtype\":";
    append_quoted(out, entry.dtype);
    out += ",\"shape\":[";
    for (size_t i = 0; i < entry.shape.size(); ++i) {
      if (i > 0) out += ',';
      out += std::to_string(entry.shape[i]);
    }
    out += "],\"data_offsets\":[" + std::to_string(entry.begin) + ',' + std::to_string(entry.end) + "]}";
  }
  return out += '}';
}

ShardHeader decode_shard_header(std::string_view json, int64_t data_bytes) {
  ShardHeader header = HeaderReader(json).header();
  // Empty tensors first where they share an offset, so that the chain below is one.
  std::ranges::stable_sort(header.entries, [](const ShardEntry& a, const ShardEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  int64_t end = 0;
  for (const ShardEntry& entry : header.entries) {
    require<CheckpointCorrupt>(entry.begin == end, "entry '", entry.name, "' begins at byte ", entry.begin,
                               " of the data; expected ", end);
    require<CheckpointCorrupt>(entry.end >= entry.begin && entry.end <= data_bytes, "entry '", entry.name,
                               "' ends at byte ", entry.end, " of the data, which has ", data_bytes);
    require<CheckpointCorrupt>(size_of(entry, data_bytes) == entry.end - entry.begin, "entry '", entry.name,
                               "' has ", entry.end - entry.begin,
                               " bytes; its shape and dtype ask for another size");
    end = entry.end;
  }
  require<CheckpointCorrupt>(end == data_bytes, "the entries cover ", end, " bytes of data; the file has ",
                             data_bytes);
  return header;
}

}  // namespace polyreme
