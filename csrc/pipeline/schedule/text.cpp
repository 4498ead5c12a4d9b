#include "pipeline/schedule/text.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/error.h"

namespace polyreme::pipeline {
namespace {

constexpr std::string_view kBlanks = " \t\r";

// What errors show of a token; only what is printable.
std::string quoted(std::string_view token) {
  std::string text = "'";
  for (const char c : token.substr(0, 40)) text += c >= ' ' && c <= '~' ? c : '?';
  return text + (token.size() > 40 ? "...'" : "'");
}

// The words of a line; each of the characters in `marks` is one of its own.
class Words {
 public:
  Words(std::string_view line, std::string_view marks) : rest_(line), marks_(marks) {}

  std::optional<std::string_view> next() {
    const size_t begin = rest_.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return std::nullopt;
    rest_.remove_prefix(begin);
    size_t end = 0;
    while (end < rest_.size() && !is_mark(end) && kBlanks.find(rest_[end]) == std::string_view::npos) ++end;
    end = std::max<size_t>(end, 1);
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(end);
    return word;
  }

 private:
  bool is_mark(size_t i) const { return marks_.find(rest_[i]) != std::string_view::npos; }

  std::string_view rest_, marks_;
};

// Takes a decimal number without sign or leading zeros from the front; -1 if there is none up to `max`.
int take_number(std::string_view& text, int max) {
  int value = 0;
  const bool digit = !text.empty() && text[0] >= '0' && text[0] <= '9';
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const auto length = static_cast<size_t>(end - text.data());
  if (!digit || error != std::errc() || value > max || (text[0] == '0' && length > 1)) return -1;
  text.remove_prefix(length);
  return value;
}

class Parser {
 public:
  Schedule run(std::string_view text) {
    require(text.size() <= kMaxTextBytes, "schedule text: ", text.size(), " bytes; expected at most ",
            kMaxTextBytes);
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      ++line_number_;
      parse_line(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return finish();
  }

 private:
  template <typename... Args>
  [[noreturn]] void fail(std::string_view token, const Args&... args) const {
    throw InvalidArgument(concat("schedule text, line ", line_number_, ", ", quoted(token), ": ", args...));
  }

  void parse_line(std::string_view line) {
    line = line.substr(0, line.find('#'));
    const size_t begin = line.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return;
    if (begin > 0) {
      if (schedule_.actions.empty())
        fail(line.substr(begin), "continues a line, but no rank's list came before");
      return parse_actions(line);
    }
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos)
      fail(line.substr(0, line.find_first_of(kBlanks)),
           "expected 'micro_batches:', 'forward_only:', 'chunks:', or a rank and a colon");
    const std::string_view key = line.substr(0, colon);
    const std::string_view value = line.substr(colon + 1);
    if (key == "micro_batches")
      parse_micro_batches(value);
    else if (key == "forward_only")
      parse_forward_only(value);
    else if (key == "chunks")
      parse_chunks(value);
    else
      parse_rank(key, value);
  }

  void header(std::string_view key, bool seen) const {
    if (seen) fail(key, "a second time");
    if (!schedule_.actions.empty()) fail(key, "comes after the first rank; put it before");
  }

  std::string_view only_word(std::string_view key, std::string_view value, const char* expected) const {
    Words words(value, "");
    const auto word = words.next();
    if (!word) fail(key, "has no value; expected ", expected);
    if (const auto more = words.next()) fail(*more, "expected only ", expected);
    return *word;
  }

  void parse_micro_batches(std::string_view value) {
    header("micro_batches", schedule_.micro_batches > 0);
    const std::string_view word = only_word("micro_batches", value, "one number");
    std::string_view rest = word;
    schedule_.micro_batches = take_number(rest, kMaxMicroBatches);
    if (schedule_.micro_batches < 1 || !rest.empty())
      fail(word, "expected a number from 1 to ", kMaxMicroBatches);
  }

  void parse_forward_only(std::string_view value) {
    header("forward_only", forward_only_seen_);
    forward_only_seen_ = true;
    const std::string_view word = only_word("forward_only", value, "true or false");
    if (word != "true" && word != "false") fail(word, "expected true or false");
    schedule_.forward_only = word == "true";
  }

  void parse_chunks(std::string_view value) {
    header("chunks", !schedule_.chunks.empty());
    schedule_.chunks.emplace_back();
    Words words(value, "|");
    int count = 0;
    while (const auto word = words.next()) {
      if (*word == "|") {
        schedule_.chunks.emplace_back();
        if (schedule_.chunks.size() > kMaxRanks) fail(*word, "more than ", kMaxRanks, " ranks");
        continue;
      }
      std::string_view rest = *word;
      const int chunk = take_number(rest, kMaxChunks - 1);
      if (chunk < 0 || !rest.empty() || ++count > kMaxChunks)
        fail(*word, "expected a chunk from 0 to ", kMaxChunks - 1, ", or '|' before the next rank's");
      schedule_.chunks.back().push_back(chunk);
    }
  }

  void parse_rank(std::string_view key, std::string_view value) {
    std::string_view rest = key;
    const int rank = take_number(rest, kMaxRanks - 1);
    const auto expected = static_cast<int>(schedule_.actions.size());
    if (rank < 0 || !rest.empty())
      fail(key, "expected micro_batches, forward_only, chunks, or a rank from 0 to ", kMaxRanks - 1);
    if (rank != expected)
      fail(key, "expected rank ", expected, " here; each has one list, in ascending order");
    if (schedule_.micro_batches == 0) fail(key, "expected 'micro_batches: N' before the first rank");
    if (chunks_default_ || schedule_.chunks.empty()) {
      chunks_default_ = true;
      schedule_.chunks.push_back({rank});
    }
    if (static_cast<size_t>(rank) >= schedule_.chunks.size())
      fail(key, "'chunks:' names ", schedule_.chunks.size(), " ranks");
    schedule_.actions.emplace_back();
    parse_actions(value);
  }

  void parse_actions(std::string_view line) {
    std::vector<Action>& list = schedule_.actions.back();
    Words words(line, "[]");
    bool in_group = false;
    size_t group = 0;  // where it begins
    while (const auto word = words.next()) {
      if (*word == "[") {
        if (in_group) fail(*word, "a group within a group");
        in_group = true;
        group = list.size();
      } else if (*word == "]") {
        if (!in_group || group == list.size()) fail(*word, in_group ? "an empty group" : "no group is open");
        in_group = false;
      } else {
        if (++num_actions_ > kMaxActions) fail(*word, "more than ", kMaxActions, " actions");
        list.push_back(parse_action(*word));
        if (in_group && !is_transfer(list.back().kind)) fail(*word, "only transfers run at once, in [ ]");
        list.back().with_previous = in_group && group + 1 < list.size();
      }
    }
    if (in_group) fail("[", "the group is not closed on its line");
  }

  // <letters><micro-batch>@<chunk>><peer>, what applies.
  Action parse_action(std::string_view word) const {
    const size_t length = std::min(word.find_first_of("0123456789@<>"), word.size());
    std::string_view rest = word.substr(length);
    Action action{kind_of(word, word.substr(0, length))};
    const bool numbered = is_compute(action.kind) || is_transfer(action.kind);
    if (numbered) action.micro_batch = take_number(rest, schedule_.micro_batches - 1);
    if (numbered && action.micro_batch < 0)
      fail(word, "expected a micro-batch from 0 to ", schedule_.micro_batches - 1, " after the letters");
    const std::vector<int>& held = schedule_.chunks[schedule_.actions.size() - 1];
    if (!rest.empty() && rest[0] == '@' && action.kind != ActionKind::kStep) {
      rest.remove_prefix(1);
      action.chunk = take_number(rest, kMaxChunks - 1);
      if (action.chunk < 0) fail(word, "expected a chunk after '@'");
    } else if (action.kind != ActionKind::kStep) {
      if (held.size() != 1) fail(word, "expected '@' and one of the ", held.size(), " chunks of this rank");
      action.chunk = held[0];
    }
    if (is_transfer(action.kind) && !rest.empty() && rest[0] == (is_send(action.kind) ? '>' : '<')) {
      rest.remove_prefix(1);
      action.peer = take_number(rest, kMaxRanks - 1);
      if (action.peer < 0) fail(word, "expected a rank after '", is_send(action.kind) ? '>' : '<', "'");
    }
    if (!rest.empty()) fail(word, "cannot read ", quoted(rest), "; expected nothing more");
    return action;
  }

  ActionKind kind_of(std::string_view word, std::string_view begin) const {
    for (int i = 0; i < kNumActionKinds; ++i)
      if (begin == letters(static_cast<ActionKind>(i))) return static_cast<ActionKind>(i);
    fail(word, "expected F, B, I, W, SA, RA, SG, RG with a number, or gather, release, reduce, step");
  }

  Schedule finish() {
    line_number_ = std::max(line_number_, 1);
    if (schedule_.actions.empty()) fail("the end", "no rank has a list; expected lines such as '0: F0 B0'");
    if (schedule_.actions.size() < schedule_.chunks.size())
      fail("the end", schedule_.actions.size(), " lists; 'chunks:' names ", schedule_.chunks.size(),
           " ranks");
    for (std::vector<int>& held : schedule_.chunks) std::sort(held.begin(), held.end());
    const std::vector<int> rank_of = rank_of_chunk(schedule_);
    // Peers that were left out are those that hold the neighbouring chunk.
    for (std::vector<Action>& list : schedule_.actions)
      for (Action& a : list)
        if (is_transfer(a.kind) && a.peer < 0 && neighbour(a) >= 0 && neighbour(a) < schedule_.num_chunks())
          a.peer = rank_of[static_cast<size_t>(neighbour(a))];
    return std::move(schedule_);
  }

  Schedule schedule_;
  int line_number_ = 0;
  bool forward_only_seen_ = false;
  bool chunks_default_ = false;  // rank r holds chunk r
  int64_t num_actions_ = 0;
};

}  // namespace

std::string to_text(const Schedule& schedule) {
  std::string text = concat("micro_batches: ", schedule.micro_batches, "\n");
  if (schedule.forward_only) text += "forward_only: true\n";
  text += "chunks:";
  for (size_t r = 0; r < schedule.chunks.size(); ++r) {
    if (r > 0) text += " |";
    for (const int chunk : schedule.chunks[r]) text += concat(" ", chunk);
  }
  text += "\n";
  for (size_t r = 0; r < schedule.actions.size(); ++r) {
    const std::vector<Action>& list = schedule.actions[r];
    text += concat(r, ":");
    for (size_t i = 0; i < list.size(); ++i) {
      const bool next_joins = i + 1 < list.size() && list[i + 1].with_previous;
      text += next_joins && !list[i].with_previous ? " [" : " ";
      text += token(list[i], schedule.chunks[r].size() > 1);
      if (list[i].with_previous && !next_joins) text += "]";
    }
    text += "\n";
  }
  return text;
}

Schedule from_text(std::string_view text) { return Parser().run(text); }

}  // namespace polyreme::pipeline
