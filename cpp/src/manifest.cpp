#include "manifest.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "json.h"
#include "sha256.h"

namespace cutlass_ops {
namespace {

constexpr std::string_view kFormat = "cutlass_ops.bundle/2";
constexpr size_t kMaxKernels = 4'000, kMaxChoices = 4'096, kMaxRows = 1'024, kMaxTables = 256, kMaxFunctions = 64;
constexpr size_t kMaxInputs = 16, kMaxOutputs = 8, kMaxNodes = 256, kMaxProducts = 1, kMaxName = 64;
constexpr int64_t kMaxExtent = int64_t(1) << 40, kMaxVersion = 1 << 16, kMaxBundleVersion = 999'999'999'999'999, kMaxResource = int64_t(1) << 32;
constexpr int64_t kMaxNumber = (int64_t(1) << 31) - 1;  // in a configuration

// ---- Tables ------------------------------------------------------------------------------------------------------

struct Op {
  std::string_view name;
  size_t arity;
  // The types of arguments and result, one word for each signature: FP32 values, booleans, 32-bit indices, 64-bit seeds. An
  // integer input is a seed.
  std::string_view types;
};
// Leaves first: the accumulator, an input, constants, statistics of A's rows, and positions.
constexpr Op kOps[] = {
    // clang-format off
    {"acc", 0, "f"}, {"input", 0, "f"}, {"const", 0, "f"}, {"integer", 0, "i"}, {"seed", 0, "s"}, {"mean_of_a", 0, "f"},
    {"mean_square_of_a", 0, "f"}, {"row_index", 0, "i"}, {"column_index", 0, "i"}, {"add", 2, "fff iii"},
    {"sub", 2, "fff iii"}, {"mul", 2, "fff iii"}, {"div", 2, "fff"}, {"neg", 1, "ff ii"}, {"minimum", 2, "fff"},
    {"maximum", 2, "fff"}, {"lt", 2, "fft iit"}, {"le", 2, "fft iit"}, {"gt", 2, "fft iit"}, {"ge", 2, "fft iit"},
    {"eq", 2, "fft iit ttt"}, {"ne", 2, "fft iit ttt"}, {"logical_and", 2, "ttt"}, {"logical_or", 2, "ttt"},
    {"logical_not", 1, "tt"}, {"where", 3, "tfff tiii"}, {"isnan", 1, "ft"}, {"to_float", 1, "tf if"}, {"abs", 1, "ff"},
    {"sign", 1, "ff"}, {"floor", 1, "ff"}, {"ceil", 1, "ff"}, {"round", 1, "ff"}, {"trunc", 1, "ff"}, {"reciprocal", 1, "ff"},
    {"square", 1, "ff"}, {"sqrt", 1, "ff"}, {"rsqrt", 1, "ff"}, {"pow", 2, "fff"}, {"exp", 1, "ff"}, {"exp2", 1, "ff"},
    {"expm1", 1, "ff"}, {"log", 1, "ff"}, {"log2", 1, "ff"}, {"log1p", 1, "ff"}, {"erf", 1, "ff"}, {"ndtr", 1, "ff"}, {"sin", 1, "ff"},
    {"cos", 1, "ff"}, {"tanh", 1, "ff"}, {"sigmoid", 1, "ff"}, {"relu", 1, "ff"}, {"leaky_relu", 2, "fff"}, {"elu", 2, "fff"},
    {"gelu", 1, "ff"}, {"gelu_tanh", 1, "ff"}, {"silu", 1, "ff"}, {"mish", 1, "ff"}, {"softplus", 1, "ff"},
    {"hardswish", 1, "ff"}, {"cast", 1, "ff"}, {"swap_pairs", 1, "ff"}, {"uniform", 2, "ssf"},
    // clang-format on
};
struct Reduction {
  std::string_view name;
  std::string_view result;  // the type of its results, if they have one only
};
constexpr Reduction kReductions[] = {{"sum", ""}, {"sum_square", ""}, {"max", ""}, {"min", ""}, {"argmax", "i32"}, {"argmin", "i32"}, {"logsumexp", ""}};
constexpr std::string_view kKinds[] = {"row", "col", "tile", "scalar", "product", "integer", "blocks_a", "blocks_b", "blocks_d"};
constexpr std::string_view kBlocks[] = {"blocks_a", "blocks_b"};  // scales of blocks, which the accumulator has already
constexpr std::string_view kOpcodes[] = {"IMMA",     "HMMA",   "DMMA",  "LDL",   "STL",  "LDGSTS", "UTMALDG",
                                         "UTMASTG", "UTMAREDG", "UBLKCP", "HGMMA", "IGMMA", "QGMMA"};
// Targets with the compute capability that runs them and whether they have wgmma.
struct Target {
  std::string_view name;
  int major, minor;
  bool wgmma;
};
constexpr Target kTargets[] = {
    {"sm_80", 8, 0, false}, {"sm_86", 8, 6, false}, {"sm_89", 8, 9, false}, {"sm_90", 9, 0, false}, {"sm_90a", 9, 0, true}};

// Names that inputs and outputs cannot have: Python's keywords and the names of a call's own arguments
// (cutlass_ops/epilogue/names.py).
constexpr std::string_view kReserved[] = {
    // clang-format off
    "a", "and", "as", "assert", "async", "await", "b", "break", "class", "continue", "def", "del", "elif", "else",
    "epilogue", "except", "False", "finally", "for", "from", "global", "if", "import", "in", "is", "lambda", "math", "None",
    "nonlocal", "not", "or", "out", "out_dtype", "pass", "raise", "return", "self", "True", "try", "while", "with",
    "yield"
    // clang-format on
};

template <class Table, class Value>
bool has(Table const& table, Value const& value) {
  return std::find(std::begin(table), std::end(table), value) != std::end(table);
}

template <class Table>
auto const* named(Table const& table, std::string_view name) {
  auto const found = std::find_if(std::begin(table), std::end(table), [&](auto const& row) { return row.name == name; });
  return found == std::end(table) ? nullptr : &*found;
}

// ---- Texts -------------------------------------------------------------------------------------------------------

std::string digest(Json& json, char const* what) {
  std::string const found = json.text(what);
  if (found.size() != 64 || found.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw json.error(std::string(what) + " is no SHA-256 in lower-case hexadecimal");
  }
  return found;
}

std::string one_of(Json& json, char const* what, std::initializer_list<std::string_view> values) {
  std::string const found = json.text(what);
  if (!has(values, found)) throw json.error(std::string(what) + " is none that there is");
  return found;
}

struct File {
  std::string sha256;
  int64_t size;
};

File file(Json& json, char const* what) {
  Fields fields(json, what);
  File found;
  fields.field("sha256"), found.sha256 = digest(json, what);
  fields.field("size"), found.size = json.integer(what, 0, kMaxFile);
  fields.end();
  return found;
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The name of an input or output. It is a keyword argument in Python. The kernel's C++ may use another name.
std::string identifier(Json& json, char const* what) {
  std::string const name = json.text(what, kMaxName);
  auto const fits = [](char c) { return is_letter(c) || is_digit(c) || c == '_'; };
  bool const good = is_letter(name[0]) && std::all_of(name.begin(), name.end(), fits);
  if (!good || has(kReserved, name)) throw json.error(std::string(what) + " has a name that it cannot have");
  return name;
}

constexpr char const* kD = "d";  // which alone may be whole numbers of 32 bits
constexpr std::string_view kPromoted = ".promoted";  // A and B of FP8, whose sums are added up in FP32

// An operand's type, such as "bf16.row.align1". Vectors and scalars are written as rows without alignment. `whole` is the type
// of indices and seeds, and of no other operand. In A and B, `blocks` may share scales, and sums may be promoted to FP32.
std::string operand(Json& json, char const* what, bool is_matrix, std::string_view whole = "",
                    std::initializer_list<std::string_view> blocks = {}) {
  std::string const found = json.text(what);
  if (!whole.empty()) {
    if (found != std::string(whole) + ".row.align1") throw json.error(std::string(what) + " has a type that it cannot have");
    return found;
  }
  std::string_view rest = found;
  auto const take = [&](std::string_view token) {
    bool const is = rest.substr(0, token.size()) == token;
    if (is) rest.remove_prefix(token.size());
    return is;
  };
  // Elements in 16 bytes.
  int const widest = take("f64")                                   ? 2
                     : take("f32") || take("tf32x3") || take("tf32") ? 4
                     : take("f16") || take("bf16")                 ? 8
                     : take("e4m3") || take("e5m2") || take("i8") ? 16
                     : what == kD && take("i32")                  ? 4  // sums of products of i8
                                                                  : 0;
  bool good = widest > 0;
  auto const drop = [&](std::string_view tail) {
    bool const is = widest == 16 && rest.size() >= tail.size() && rest.substr(rest.size() - tail.size()) == tail;
    if (is) rest.remove_suffix(tail.size());
    return is;
  };
  if (blocks.size() != 0) drop(kPromoted);
  for (std::string_view each : blocks) {
    if (drop(each)) break;
  }
  good = good && (take(".row") || (is_matrix && take(".col")));
  if (good && take(".align")) {
    int alignment = 0;
    good = rest.size() <= 2 && !rest.empty() && rest[0] != '0' && std::all_of(rest.begin(), rest.end(), is_digit);
    for (char c : rest) alignment = alignment * 10 + (c - '0');
    good = good && (is_matrix ? alignment < widest : alignment == 1);
  } else {
    good = good && is_matrix && rest.empty();
  }
  if (!good) throw json.error(std::string(what) + " has a type that there is not");
  return found;
}

// Whether a string is the result of Python's float.hex() for an FP32 value.
bool is_constant(std::string_view text) {
  if (text == "nan") return true;
  if (text.substr(0, 1) == "-") text.remove_prefix(1);
  if (text == "inf" || text == "0x0.0p+0") return true;
  if (text.size() < 20 || text.size() > 22 || text.substr(0, 4) != "0x1." || text[17] != 'p') return false;
  uint64_t mantissa = 1;
  for (char c : text.substr(4, 13)) {
    if (!is_digit(c) && (c < 'a' || c > 'f')) return false;
    mantissa = mantissa << 4 | uint64_t(is_digit(c) ? c - '0' : c - 'a' + 10);
  }
  std::string_view const digits = text.substr(19);
  if (!std::all_of(digits.begin(), digits.end(), is_digit) || (digits[0] == '0' && text.substr(18) != "+0")) return false;
  int exponent = 0;
  for (char c : digits) exponent = exponent * 10 + (c - '0');
  if (text[18] == '-') exponent = -exponent;
  // 23 bits after the first, fewer for subnormal numbers.
  int const unused = 52 - 23 + std::max(0, -126 - exponent);
  return (text[18] == '+' || text[18] == '-') && exponent <= 127 && exponent >= -149 && mantissa % (uint64_t(1) << unused) == 0;
}

// ---- Configurations ----------------------------------------------------------------------------------------------

enum class Arch { kGemv, kSm80, kSm90 };

int64_t number(Json& json, char const* what) { return json.integer(what, -kMaxNumber, kMaxNumber); }

// If there is a default, the field is omitted when it has that value.
void shape(Json& json, Fields& fields, char const* name, std::initializer_list<char const*> extents,
           std::vector<int64_t> const& usual = {}) {
  if (usual.empty()) fields.field(name);
  else if (!fields.has(name)) return;
  Fields each(json, name);
  std::vector<int64_t> found;
  for (char const* extent : extents) each.field(extent), found.push_back(json.integer(name, 1, kMaxNumber));
  each.end();
  if (found == usual) throw json.error(std::string(name) + " has its default, which is left out");
}

struct Config {
  Arch arch = Arch::kGemv;
  bool ordered = false;  // whether a launch may choose a raster order of its tiles
};

// A field is omitted when it has its default.
Config config(Json& json) {
  Fields fields(json, "a configuration");
  bool const promoted = fields.has("accumulation");
  if (promoted) one_of(json, "accumulation", {"promoted"});
  fields.field("arch");
  std::string const arch = one_of(json, "arch", {"gemv", "pointwise", "sm80", "sm90", "small"});
  if (promoted && arch != "sm90") throw json.error("a configuration has a field that is none of its kind");
  // Returns a field's number, or its default.
  auto const other_than = [&](char const* name, int64_t usual) {
    if (!fields.has(name)) return usual;
    int64_t const found = number(json, name);
    if (found == usual) throw json.error(std::string(name) + " has its default, which is left out");
    return found;
  };
  auto const flag = [&](char const* name) {
    if (fields.has(name)) json.expect("true", std::string(name) + ", true,");
  };
  if (arch == "gemv") {
    other_than("pieces", 8), other_than("rows", 1), other_than("warps", 8);
    fields.end();
    return {};
  }
  if (arch == "pointwise") {
    other_than("rows", 16);
    fields.end();
    return {};
  }
  if (arch == "sm80") {
    shape(json, fields, "instruction", {"k", "m", "n"}, {16, 16, 8});
    other_than("stages", 3);
    flag("stream_k");
    shape(json, fields, "threadblock", {"k", "m", "n"});
    shape(json, fields, "warp", {"k", "m", "n"});
    fields.end();
    return {Arch::kSm80};
  }
  if (arch == "small") {
    other_than("stages", 3);
    shape(json, fields, "threadblock", {"k", "m", "n"});
    other_than("warps", 2);
    fields.end();
    return {};
  }
  shape(json, fields, "cluster", {"m", "n"}, {1, 1});
  if (fields.has("means")) one_of(json, "means", {"beside", "ahead"});
  flag("realign");
  other_than("resident", 1);
  bool ordered = true;
  if (fields.has("schedule")) ordered = one_of(json, "schedule", {"cooperative", "warp_specialized"}) == "cooperative";
  if (fields.has("scheduler")) one_of(json, "scheduler", {"stream_k"}), ordered = false;
  if (other_than("split_k", 1) != 1) ordered = false;
  if (fields.has("stages")) number(json, "stages");
  flag("swap_ab");
  shape(json, fields, "threadblock", {"k", "m", "n"});
  fields.end();
  return {Arch::kSm90, ordered};
}

// An order of tiles, as a launch takes it.
struct TileOrder {
  bool by_gpc = false;
  int raster = 0;
  int swizzle = 1;
};

TileOrder tile_order(Json& json) {
  TileOrder found;
  Fields fields(json, "an order of tiles");
  if (fields.has("by_gpc")) json.expect("true", "by_gpc, true,"), found.by_gpc = true;
  if (fields.has("raster")) found.raster = one_of(json, "raster", {"along_m", "along_n"}) == "along_m" ? 1 : 2;
  if (fields.has("swizzle")) {
    found.swizzle = int(json.integer("swizzle", 2, 8));
    if ((found.swizzle & (found.swizzle - 1)) != 0) throw json.error("swizzle is none that there is");
  }
  fields.end();
  return found;
}

// ---- Epilogues ---------------------------------------------------------------------------------------------------

struct Named {
  std::string name, kind;
  std::string_view whole = "";  // its type where it counts or seeds
};

struct Node {
  Op const* op;
  std::vector<size_t> arguments;
  char type;  // of its value: a letter of Op::types
  std::string attribute;
  std::string text;  // the text in the manifest
};

struct Output {
  std::string name, kind, reduction;
  std::string_view whole;  // as above
  size_t node;
};

struct Graph {
  std::vector<Named> inputs;
  std::vector<Node> nodes;
  std::vector<Output> outputs;
};

std::string kind(Json& json) {
  std::string const found = json.text("a kind");
  if (!has(kKinds, found)) throw json.error("a kind is none that there is");
  return found;
}

// The type of an operation's result, for arguments of the given types. Each type is a letter.
char given(Json& json, Op const& op, std::string const& taken) {
  for (std::string_view rest = op.types; !rest.empty();) {
    std::string_view const way = rest.substr(0, rest.find(' '));
    if (way.substr(0, way.size() - 1) == taken) return way.back();
    rest.remove_prefix(std::min(rest.size(), way.size() + 1));
  }
  throw json.error("an operation takes no arguments of such types");
}

Node node(Json& json, Graph const& graph) {
  size_t const begin = json.at();
  json.expect("[", "a node, a list,");
  Node found;
  found.op = named(kOps, json.text("an operation"));
  if (found.op == nullptr) throw json.error("there is no such operation");
  std::string_view const name = found.op->name;
  json.expect(",", "the arguments of an operation");
  int64_t const last = int64_t(graph.nodes.size()) - 1;
  json.list("arguments", found.op->arity, [&] { found.arguments.push_back(size_t(json.integer("a node", 0, last))); });
  if (found.arguments.size() != found.op->arity) throw json.error("an operation has too few arguments");
  std::string taken;
  for (size_t argument : found.arguments) taken += graph.nodes[argument].type;
  found.type = given(json, *found.op, taken);
  json.expect(",", "the attribute of an operation");
  bool good = true;
  if (name == "input") {
    found.attribute = json.text("an input");
    Named const* const input = named(graph.inputs, found.attribute);
    good = input != nullptr;
    if (good && !input->whole.empty()) found.type = 's';
  } else if (name == "integer" || name == "seed") {
    int64_t const most = name == "seed" ? std::numeric_limits<int64_t>::max() : kMaxNumber;
    found.attribute = std::to_string(json.integer("a constant", -most - 1, most));
  } else if (name == "const") {
    found.attribute = json.text("a constant");
    good = is_constant(found.attribute);
  } else if (name == "cast") {
    found.attribute = one_of(json, "a type", {"f16", "bf16", "e4m3", "e5m2"});
  } else {
    json.expect("null", "no attribute, null,");
  }
  if (!good) throw json.error("an operation has an attribute that is none for it");
  if (name == "swap_pairs" && graph.nodes[found.arguments[0]].op->name == "const") {
    throw json.error("a pair of constants has no node");
  }
  json.expect("]", "the end of a node");
  found.text = json.since(begin);
  return found;
}

Output output(Json& json, Graph const& graph) {
  json.expect("[", "an output, a list,");
  Output found;
  // The first output is D. No other may have its name.
  bool const first = graph.outputs.empty();
  found.name = first ? one_of(json, "the first output", {"d"}) : identifier(json, "an output");
  json.expect(",", "the node of an output");
  found.node = size_t(json.integer("a node", 0, int64_t(graph.nodes.size()) - 1));
  json.expect(",", "the kind of an output");
  found.kind = kind(json);
  json.expect(",", "the reduction of an output");
  bool good;
  if (json.take("null")) {
    good = found.kind == "tile";
  } else {
    found.reduction = json.text("a reduction");
    Reduction const* const reduction = named(kReductions, found.reduction);
    if (found.kind == "blocks_d") {
      // The scales of D's blocks: the second output, of D's value.
      bool const second = graph.outputs.size() == 1 && found.name == "d_scale" && found.node == graph.outputs[0].node;
      good = second && (found.reduction == "e4m3" || found.reduction == "e5m2");
    } else {
      good = !first && reduction != nullptr && (found.kind == "row" || found.kind == "col");
      if (good) found.whole = reduction->result;
    }
  }
  good = good && graph.nodes[found.node].type == 'f';
  if (!good) throw json.error("an output has a kind or a reduction that it cannot have");
  json.expect("]", "the end of an output");
  return found;
}

// Whether the nodes are unique and used, and in the order in which the outputs first need them.
bool is_canonical(Graph const& graph) {
  std::set<std::string_view> texts;
  for (Node const& node : graph.nodes) {
    if (!texts.insert(node.text).second) return false;
  }
  size_t placed = 0;  // nodes before this index have been visited in order
  for (Output const& output : graph.outputs) {
    std::vector<size_t> left = {output.node};
    while (!left.empty()) {
      size_t const at = left.back();
      if (at < placed) {
        left.pop_back();
        continue;
      }
      auto const& arguments = graph.nodes[at].arguments;
      auto const missing = std::find_if(arguments.begin(), arguments.end(), [&](size_t a) { return a >= placed; });
      if (missing != arguments.end()) {
        left.push_back(*missing);
        continue;
      }
      if (at != placed++) return false;
      left.pop_back();
    }
  }
  return placed == graph.nodes.size();
}

Graph graph(Json& json) {
  Graph found;
  std::set<std::string> names;
  auto const own = [&](std::string const& name) {
    if (!names.insert(name).second) throw json.error("two inputs or outputs have the name " + name);
  };
  Fields fields(json, "an epilogue");
  fields.field("inputs");
  size_t products = 0;
  json.list("inputs", kMaxInputs, [&] {
    json.expect("[", "an input, a list,");
    std::string name = identifier(json, "an input");
    json.expect(",", "the kind of an input");
    found.inputs.push_back({std::move(name), kind(json)});
    json.expect("]", "the end of an input");
    if (found.inputs.back().kind == "blocks_d") throw json.error("an input is of the kind of D's scales");
    if (found.inputs.back().kind == "integer") found.inputs.back().whole = "i64";
    own(found.inputs.back().name);
    if (found.inputs.back().kind == "product" && ++products > kMaxProducts) throw json.error("an epilogue has one product");
  });
  fields.field("nodes");
  json.list("nodes", kMaxNodes, [&] { found.nodes.push_back(node(json, found)); });
  fields.field("outputs");
  json.list("outputs", kMaxOutputs, [&] {
    found.outputs.push_back(output(json, found));
    bool const further = found.outputs.size() > 1;
    if (further && found.outputs.back().name == "d") throw json.error("two outputs have the name d");
    if (further) own(found.outputs.back().name);
  });
  fields.end();
  if (found.outputs.empty()) throw json.error("an epilogue has no outputs");
  if (!is_canonical(found)) throw json.error("the epilogue is not canonical: nodes stand once, and in the order of their use");
  auto const used = [&](std::string_view op, std::string_view attribute) {
    auto const is = [&](Node const& node) { return node.op->name == op && node.attribute == attribute; };
    return std::any_of(found.nodes.begin(), found.nodes.end(), is);
  };
  size_t blocks = 0;
  for (Named const& input : found.inputs) {
    bool const is_used = used("input", input.name), scales = has(kBlocks, input.kind);
    if (is_used == scales) throw json.error("no output depends on the input " + input.name);
    blocks += scales;
    if (scales && (products != 0 || used("mean_of_a", "") || used("mean_square_of_a", ""))) {
      throw json.error("an epilogue with scales of blocks has values without them");
    }
  }
  for (std::string_view kind : kBlocks) {
    auto const is = [&](Named const& input) { return input.kind == kind; };
    if (blocks != 0 && (blocks != 2 || std::none_of(found.inputs.begin(), found.inputs.end(), is))) {
      throw json.error("an epilogue has scales of blocks of both operands, each once, or none");
    }
  }
  bool const multiplies = products != 0 || blocks != 0 || used("mean_of_a", "") || used("mean_square_of_a", "");
  if (multiplies && !used("acc", "")) throw json.error("no output depends on the accumulator");
  return found;
}

// An epilogue as expressions. People and programs identify it by this text.
std::string expressions(Graph const& graph) {
  constexpr size_t kMost = 1000;  // characters; shared subexpressions could make it exponentially long
  std::vector<std::string> nodes;
  for (Node const& node : graph.nodes) {
    std::string arguments;
    for (size_t argument : node.arguments) arguments += (arguments.empty() ? "" : ", ") + nodes[argument];
    std::string expression(node.op->name);
    if (expression == "input" || expression == "const" || expression == "integer" || expression == "seed") {
      expression = node.attribute;
    } else if (!arguments.empty()) {
      expression += "(" + arguments + (node.attribute.empty() ? "" : ", " + node.attribute) + ")";
    }
    nodes.push_back(expression.size() <= kMost ? expression : "node " + std::to_string(nodes.size()));
  }
  std::string all;
  for (Output const& output : graph.outputs) {
    all += (all.empty() ? "" : "; ") + output.name + " = ";
    if (output.kind == "blocks_d") all += "scale of each 1x128 in " + output.reduction + " of ";
    else if (!output.reduction.empty()) all += output.reduction + " for each " + output.kind + " of ";
    all += nodes[output.node];
  }
  return all;
}

// ---- Signatures, kernels and choices -----------------------------------------------------------------------------

// Types by name, which must be exactly the given names.
std::map<std::string, std::string> types(Json& json, char const* what, std::vector<Named> const& all) {
  std::map<std::string, std::string> found;
  json.object(what, all.size(), [&](std::string const& name) {
    Named const* const known = named(all, name);
    if (known == nullptr) throw json.error(std::string(what) + " has the type of something else");
    found[name] = operand(json, what, known->kind == "tile" || known->kind == "product", known->whole);
  });
  if (found.size() != all.size()) throw json.error(std::string(what) + " has too few types");
  return found;
}

constexpr std::string_view kBatched = "batched", kGrouped = "grouped", kRaggedK = "ragged_k";

Manifest::Declaration signature(Json& json, Signature& found) {
  Manifest::Declaration declaration;
  size_t begin = json.at();
  Fields fields(json, "a signature");
  fields.field("a");
  found.operands.push_back({"a", operand(json, "a", true, "", {".blocks1x128"})});
  fields.field("b");
  found.operands.push_back({"b", operand(json, "b", true, "", {".blocks128x128", ".blocks128x1"})});
  declaration.types_a_b = json.since(begin);
  begin = json.at();
  fields.field("d");
  found.operands.push_back({"out", operand(json, kD, true)});
  fields.field("epilogue");
  Graph const epilogue = graph(json);
  found.epilogue = expressions(epilogue);
  if (fields.has("form")) found.form = one_of(json, "form", {kBatched, kGrouped, kRaggedK});  // the dense form is left out
  if (found.form == kGrouped || found.form == kRaggedK) found.operands.push_back({"offsets", "i32.row.align1"});
  bool const scaled = std::any_of(epilogue.inputs.begin(), epilogue.inputs.end(),
                                  [](Named const& input) { return has(kBlocks, input.kind); });
  for (size_t i : {0, 1}) {
    bool const blocks = found.operands[i].type.find(".blocks") != std::string::npos;
    if (blocks != scaled) throw json.error("operands have blocks, or the epilogue has scales of them, and not both");
  }
  auto const promoted = [&](size_t i) { return found.operands[i].type.find(kPromoted) != std::string::npos; };
  if (promoted(0) != promoted(1)) throw json.error("sums with one operand are added up in FP32, and with the other they are not");
  std::vector<Named> further;
  for (size_t i = 1; i < epilogue.outputs.size(); ++i) {
    Output const& output = epilogue.outputs[i];
    further.push_back({output.name, output.kind, output.whole});
  }
  for (auto const& [name, all] : {std::pair{"inputs", &epilogue.inputs}, std::pair{"outputs", &std::as_const(further)}}) {
    fields.field(name);
    std::map<std::string, std::string> const given = types(json, name, *all);
    for (Named const& one : *all) found.operands.push_back({one.name, given.at(one.name)});
  }
  declaration.types_d = json.since(begin);
  fields.end();
  return declaration;
}

struct Kernel {
  KernelInfo info;
  Config config;
  Manifest::Identity identity;
  int64_t source_size;

  bool runs_on(Capability capability) const {
    Target const& target = *named(kTargets, info.target);
    return target.wgmma == (config.arch == Arch::kSm90) && target.major == capability.major && target.minor == capability.minor;
  }
};

Kernel kernel(Json& json) {
  Kernel found;
  Fields fields(json, "a kernel");
  fields.field("config");
  size_t const begin = json.at();
  found.config = config(json);
  found.identity.config = json.since(begin);
  fields.field("headers"), found.identity.headers = digest(json, "headers");
  fields.field("key"), found.info.key = digest(json, "key");
  fields.field("library");
  File const library = file(json, "library");
  found.info.sha256 = library.sha256, found.info.size = library.size;
  fields.field("resources");
  json.list("resources", kMaxFunctions, [&] {
    Fields of_function(json, "resources");
    of_function.field("function"), json.text("function", 1 << 16);
    for (char const* name : {"registers", "spill_loads", "spill_stores", "stack", "static_shared_memory"}) {
      of_function.field(name), json.integer(name, 0, kMaxResource);
    }
    of_function.end();
  });
  fields.field("sass");
  json.object("sass", std::size(kOpcodes), [&](std::string const& name) {
    if (!has(kOpcodes, name)) throw json.error("sass names an unknown instruction");
    json.integer("sass", 0, kMaxFile);
  });
  fields.field("source");
  File const source = file(json, "source");
  found.identity.source = source.sha256, found.source_size = source.size;
  fields.field("target"), found.info.target = json.text("target");
  if (named(kTargets, found.info.target) == nullptr) throw json.error("target is none that there is");
  fields.end();
  return found;
}

// A choice in the manifest, read before the kernels that it names.
struct Row {
  int64_t most;
  size_t kernel;
  TileOrder order;
};

struct GivenChoice {
  Weight weight;
  std::vector<Row> rows;
};

GivenChoice choice(Json& json) {
  GivenChoice found;
  Fields fields(json, "a choice");
  fields.field("capability");
  json.expect("[", "capability, a list,");
  found.weight.capability.major = int(json.integer("capability", 1, 99));
  json.expect(",", "a minor number");
  found.weight.capability.minor = int(json.integer("capability", 0, 99));
  json.expect("]", "the end of capability");
  fields.field("k"), found.weight.k = json.integer("k", 1, kMaxExtent);
  fields.field("n"), found.weight.n = json.integer("n", 1, kMaxExtent);
  fields.field("rows");
  json.list("rows", kMaxRows, [&] {
    json.expect("[", "a row of a choice, a list,");
    int64_t const low = found.rows.empty() ? 1 : found.rows.back().most + 1;
    int64_t const most = json.integer("rows", low, kMaxExtent);
    json.expect(",", "a kernel");
    auto const at = size_t(json.integer("a kernel", 0, int64_t(kMaxKernels) - 1));
    json.expect(",", "an order of tiles");
    found.rows.push_back({most, at, tile_order(json)});
    json.expect("]", "the end of a row of a choice");
  });
  if (found.rows.empty()) throw json.error("a choice has no rows");
  fields.end();
  return found;
}

Weight weight(Json const& json, GivenChoice& given, std::vector<Kernel> const& kernels) {
  for (Row const& row : given.rows) {
    if (row.kernel >= kernels.size()) throw json.error("a choice names a kernel that there is not");
    Kernel const& kernel = kernels[row.kernel];
    auto const& [by_gpc, raster, swizzle] = row.order;
    // As `refuses` of the configurations in cutlass_ops/declare/config.py.
    auto const [arch, ordered] = kernel.config;
    bool const taken = arch == Arch::kSm90 ? ordered || !by_gpc : !by_gpc && raster == 0 && (swizzle == 1 || arch == Arch::kSm80);
    if (!taken) throw json.error("an order of tiles is none that the kernel has");
    if (!kernel.runs_on(given.weight.capability)) throw json.error("a choice names a kernel for another device");
    // As cutlass_ops/declare/order.py numbers orders.
    given.weight.rows.push_back({row.most, {kernel.info.key, {raster + (by_gpc ? 4 : 0), swizzle}}});
  }
  return std::move(given.weight);
}

void insert_file(Json const& json, Manifest& manifest, std::string name, int64_t size) {
  if (!manifest.files.emplace(std::move(name), size).second) throw json.error("a key or a table stands twice");
}

void group(Json& json, Manifest& manifest) {
  Fields fields(json, "a signature's entry");
  std::vector<GivenChoice> choices;
  std::set<std::tuple<int, int, int64_t, int64_t>> weights;
  fields.field("choices");
  json.list("choices", kMaxChoices, [&] {
    choices.push_back(choice(json));
    Weight const& w = choices.back().weight;
    if (!weights.emplace(w.capability.major, w.capability.minor, w.n, w.k).second) throw json.error("a choice stands twice");
  });

  std::vector<Kernel> kernels;
  std::set<std::pair<std::string, std::string>> configs;
  fields.field("kernels");
  json.list("kernels", kMaxKernels, [&] {
    kernels.push_back(kernel(json));
    Kernel const& last = kernels.back();
    if (!configs.emplace(last.identity.config, last.info.target).second) throw json.error("a kernel stands twice");
    insert_file(json, manifest, "kernels/" + last.info.key + ".so", last.info.size);
    insert_file(json, manifest, "sources/" + last.info.key + ".cu", last.source_size);
  });
  if (kernels.empty()) throw json.error("a signature has no kernels");

  Signature found;
  fields.field("signature");
  Manifest::Declaration declaration = signature(json, found);
  for (GivenChoice& given : choices) found.weights.push_back(weight(json, given, kernels));
  for (Kernel& kernel : kernels) {
    found.kernels.push_back(std::move(kernel.info));
    declaration.kernels.push_back(std::move(kernel.identity));
  }
  fields.end();
  manifest.signatures.push_back(std::move(found));
  manifest.declarations.push_back(std::move(declaration));
}

// ---- The whole ---------------------------------------------------------------------------------------------------

void flags(Json& json, Manifest& manifest) {
  json.object("flags", std::size(kTargets), [&](std::string const& target) {
    size_t const begin = json.at();
    Fields steps(json, "flags of a target");
    for (char const* step : {"device", "host", "link"}) {
      steps.field(step);
      json.list("flags", 100, [&] { json.text("a flag"); });
    }
    steps.end();
    manifest.flags[target] = json.since(begin);
  });
}

// The manifest's own digest detects accidental changes. It covers the text without the digest.
void require_own_digest(Json const& json, std::string const& text, size_t begin, size_t end, std::string const& own) {
  if (sha256(std::string(text).erase(begin, end - begin)) != own) throw json.error("its own SHA-256 is another: it was changed");
}

// Check the format first: another format may differ in any field.
void require_format(std::string const& text) {
  constexpr std::string_view kField = "\"format\":\"";
  size_t const at = text.find(kField);
  if (at == std::string::npos) throw JsonError("it has no format");
  std::string found = text.substr(at + kField.size(), 80);
  found = found.substr(0, found.find('"'));
  if (found == kFormat) return;
  for (char& c : found) c = c < ' ' || c > '~' ? '?' : c;
  throw BundleError("its format is \"" + found + "\", and this program reads \"" + std::string(kFormat) +
                    "\": make the bundle again");
}

Manifest whole(std::string const& text) {
  require_format(text);
  Manifest found;
  Json json(text);
  Fields fields(json, "it");
  fields.field("abi"), found.abi = json.integer("abi", 1, kMaxVersion);
  fields.field("flags"), flags(json, found);
  fields.field("format"), one_of(json, "format", {kFormat});
  fields.field("library_version"), found.library_version = json.text("library_version");
  size_t const begin = json.at();
  fields.field("sha256");
  std::string const own = digest(json, "sha256");
  size_t const end = json.at();
  fields.field("signatures");
  size_t kernels = 0;
  std::set<std::string> signatures, targets, given;
  json.list("signatures", kMaxKernels, [&] {
    group(json, found);
    Manifest::Declaration const& last = found.declarations.back();
    if (!signatures.insert(last.types_a_b + last.types_d).second) throw json.error("a signature stands twice");
    kernels += last.kernels.size();
    if (kernels > kMaxKernels) throw json.error("it has more than " + std::to_string(kMaxKernels) + " kernels");
    for (KernelInfo const& kernel : found.signatures.back().kernels) targets.insert(kernel.target);
  });
  fields.field("tables");
  json.list("tables", kMaxTables, [&] {
    File const table = file(json, "a table");
    insert_file(json, found, "tables/" + table.sha256 + ".json", table.size);
  });
  fields.field("templates"), found.templates = json.integer("templates", 1, kMaxVersion);
  fields.field("toolchain");
  size_t const toolchain = json.at();
  Fields versions(json, "toolchain");
  for (char const* name : {"cutlass", "host_compiler", "nvcc", "tvm_ffi"}) {
    versions.field(name);
    std::string version = json.text(name, 300);
    if (std::string_view(name) == "nvcc") found.nvcc = std::move(version);
  }
  versions.end();
  found.toolchain = json.since(toolchain);
  if (fields.has("version")) found.version = json.integer("version", 1, kMaxBundleVersion);
  fields.end();
  if (json.at() != text.size()) throw json.error("it has ended, and something follows");
  for (auto const& [target, steps] : found.flags) given.insert(target);
  if (given != targets) throw json.error("flags must name the targets of its kernels, and no others");
  require_own_digest(json, text, begin, end, own);
  return found;
}

}  // namespace

Manifest read_manifest(std::string const& text) {
  try {
    return whole(text);
  } catch (JsonError const& error) {
    throw BundleError(std::string("the manifest is wrong: ") + error.what());
  }
}

// The SHA-256 of the canonical JSON of what changes the binary, as in cutlass_ops/artifacts/manifest.py and store.py.
std::string Manifest::key_of(size_t signature, size_t kernel) const {
  Declaration const& declaration = declarations[signature];
  auto const& [config, headers, source] = declaration.kernels[kernel];
  std::string const& target = signatures[signature].kernels[kernel].target;
  std::string const spec = declaration.types_a_b + ",\"config\":" + config + declaration.types_d + ",\"target\":\"" + target + "\"}";
  return sha256("{\"flags\":" + flags.at(target) + ",\"headers\":\"" + headers + "\",\"source\":\"" + source + "\",\"spec\":" + spec +
                ",\"target\":\"" + target + "\",\"templates\":" + std::to_string(templates) + ",\"toolchain\":" + toolchain + "}");
}

std::string manifest_tables() {
  std::string text = "versions " + std::to_string(kAbi) + " " + std::to_string(kTemplates) + " " + std::string(kFormat) + "\n";
  auto const add = [&](char const* what, auto const& table, auto const& shown) {
    text += what;
    for (auto const& row : table) text += " " + shown(row);
    text += "\n";
  };
  auto const plain = [](std::string_view value) { return std::string(value); };
  add("ops", kOps, [](Op const& op) {
    std::string text = std::string(op.name) + ":" + std::to_string(op.arity) + ":" + std::string(op.types);
    std::replace(text.begin(), text.end(), ' ', ',');
    return text;
  });
  add("reductions", kReductions, [](Reduction const& r) {
    return std::string(r.name) + (r.result.empty() ? "" : ":") + std::string(r.result);
  });
  add("kinds", kKinds, plain);
  add("opcodes", kOpcodes, plain);
  add("targets", kTargets, [](Target const& t) {
    return std::string(t.name) + ":" + std::to_string(t.major) + "." + std::to_string(t.minor) + (t.wgmma ? ":wgmma" : "");
  });
  add("reserved", kReserved, plain);
  auto const number = [](int64_t value) { return std::to_string(value); };
  add("limits", std::initializer_list<int64_t>{kMaxFile, kMaxManifest, kMaxKernels, kMaxChoices, kMaxRows, kMaxTables, kMaxFunctions,
      kMaxExtent, kMaxInputs, kMaxOutputs, kMaxNodes, kMaxProducts, kMaxName, kMaxNumber}, number);
  return text;
}

}  // namespace cutlass_ops
