// A reader of canonical JSON, as cutlass_ops/base/checked_json.py's canonical() writes it: fields sorted by name, no spaces,
// integers, and strings of printable ASCII. The caller asks for each expected value in turn. So unknown fields are not stored,
// nothing recurses, and other spellings of a value are rejected.

#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace cutlass_ops {

// The text is not the expected value.
struct JsonError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  // The text must outlive the results of text() and since().
  explicit Json(std::string_view text) : text_(text) {}

  size_t at() const { return at_; }
  // The text that was read since a position.
  std::string_view since(size_t begin) const { return text_.substr(begin, at_ - begin); }

  bool take(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  // Whether a character is next.
  bool next(char c) const { return at_ < text_.size() && text_[at_] == c; }

  void expect(std::string_view token, std::string const& what) {
    if (!take(token)) throw error(what + " is expected");
  }

  // A string of 1 to `most` characters.
  std::string text(char const* what, size_t most = 100) {
    expect("\"", std::string(what) + ", a text,");
    std::string found;
    for (;;) {
      if (at_ == text_.size()) throw error(std::string(what) + " does not end");
      char c = text_[at_++];
      if (c == '"') break;
      // The only escapes that printable ASCII needs.
      if (c == '\\' && at_ < text_.size() && (text_[at_] == '"' || text_[at_] == '\\')) {
        c = text_[at_++];
      } else if (c < ' ' || c > '~' || c == '\\') {
        throw error(std::string(what) + " must be a text of printable ASCII");
      }
      if (found.size() == most) throw error(std::string(what) + " has more than " + std::to_string(most) + " characters");
      found += c;
    }
    if (found.empty()) throw error(std::string(what) + " is empty");
    return found;
  }

  int64_t integer(char const* what, int64_t low, int64_t high) {
    size_t const begin = at_;
    bool const negative = take("-");
    uint64_t value = 0;
    bool fits = true;
    size_t const digits = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      uint64_t const digit = uint64_t(text_[at_] - '0');
      fits = fits && value <= (uint64_t(std::numeric_limits<int64_t>::max()) + (negative ? 1 : 0) - digit) / 10;
      if (fits) value = value * 10 + digit;
    }
    std::string_view const number = since(begin);
    bool const is_whole = at_ > digits && (at_ == text_.size() || std::string_view(".eE").find(text_[at_]) == std::string_view::npos);
    bool const is_canonical = is_whole && (text_[digits] != '0' || number.size() == 1);
    int64_t const found = int64_t(negative ? uint64_t(0) - value : value);
    if (!is_canonical || !fits || found < low || found > high) {
      at_ = begin;
      std::string const shown = is_canonical ? std::string(number.substr(0, 20)) + (number.size() > 20 ? "..." : "") : "something else";
      throw error(std::string(what) + " must be an integer from " + std::to_string(low) + " to " + std::to_string(high) +
                  ", not " + shown);
    }
    return found;
  }

  bool boolean(char const* what) {
    if (take("true")) return true;
    expect("false", std::string(what) + ", true or false,");
    return false;
  }

  // Calls a function for each value of a list of at most `most` values.
  template <class Each>
  void list(char const* what, size_t most, Each&& each) {
    expect("[", std::string(what) + ", a list,");
    if (take("]")) return;
    size_t count = 0;
    do {
      if (count++ == most) throw error(std::string(what) + " has more than " + std::to_string(most) + " values");
      each();
    } while (take(","));
    expect("]", "the end of " + std::string(what));
  }

  // Calls a function with the name of each field of an object of at most `most` fields. The function reads the value.
  template <class Each>
  void object(char const* what, size_t most, Each&& each) {
    expect("{", std::string(what) + ", an object,");
    if (take("}")) return;
    size_t count = 0;
    std::string last;
    do {
      std::string name = text(what);
      if (count > 0 && name <= last) throw error(std::string(what) + " has " + name + " twice, or not in its place");
      if (count++ == most) throw error(std::string(what) + " has more than " + std::to_string(most) + " fields");
      expect(":", "a value");
      each(std::as_const(name));
      last = std::move(name);
    } while (take(","));
    expect("}", "the end of " + std::string(what));
  }

  JsonError error(std::string const& why) const { return JsonError("at byte " + std::to_string(at_) + ", " + why); }

 private:
  std::string_view text_;
  size_t at_ = 0;
};

// An object with known fields, which are read sorted by name.
class Fields {
 public:
  Fields(Json& json, char const* what) : json_(json), what_(what) { json_.expect("{", std::string(what) + ", an object,"); }

  // Moves to a field's value.
  void field(char const* name) {
    if (!has(name)) throw json_.error("the field " + std::string(name) + " of " + what_ + " is expected");
  }

  // Moves to a field's value if the field exists.
  bool has(char const* name) {
    if (!json_.take((first_ ? "\"" : ",\"") + std::string(name) + "\":")) return false;
    first_ = false;
    return true;
  }

  void end() { json_.expect("}", "the end of " + what_); }

 private:
  Json& json_;
  std::string what_;
  bool first_ = true;
};

}  // namespace cutlass_ops
