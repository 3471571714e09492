// JSON in the one spelling that cutlass_ops/base/checked_json.py's canonical() gives values of a manifest: fields in the order of their
// names, no space, integers, and texts of printable ASCII. A reader of a format calls for what comes next, so that nothing is
// kept that the format does not have, nothing recurses, and no other spelling of a value is taken for it.

#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace cutlass_ops {

// The text is not what was called for.
struct JsonError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  // The text must live as long as what text() and since() return.
  explicit Json(std::string_view text) : text_(text) {}

  size_t at() const { return at_; }
  // What was read since a place.
  std::string_view since(size_t begin) const { return text_.substr(begin, at_ - begin); }

  bool take(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  void expect(std::string_view token, std::string const& what) {
    if (!take(token)) throw error(what + " is expected");
  }

  // A text of one to so many characters.
  std::string text(char const* what, size_t most = 100) {
    expect("\"", std::string(what) + ", a text,");
    std::string found;
    for (;;) {
      if (at_ == text_.size()) throw error(std::string(what) + " does not end");
      char c = text_[at_++];
      if (c == '"') break;
      // All that has to be escaped in printable ASCII.
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
      throw error(std::string(what) + " holds " + shown + ": an integer from " + std::to_string(low) + " to " +
                  std::to_string(high) + " is needed");
    }
    return found;
  }

  bool boolean(char const* what) {
    if (take("true")) return true;
    expect("false", std::string(what) + ", true or false,");
    return false;
  }

  // Calls for each value of a list, which has at most so many.
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

  // Calls with the name of each field of an object, which has at most so many, to read the value.
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

// An object whose fields are known, to be read in the order of their names.
class Fields {
 public:
  Fields(Json& json, char const* what) : json_(json), what_(what) { json_.expect("{", std::string(what) + ", an object,"); }

  // Goes to a field's value.
  void field(char const* name) {
    if (!has(name)) throw json_.error("the field " + std::string(name) + " of " + what_ + " is expected");
  }

  // Goes to a field's value if the field is there.
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
