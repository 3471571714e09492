#include "manifest.h"

#include <algorithm>
#include <limits>
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
constexpr size_t kMaxInputs = 16, kMaxOutputs = 8, kMaxNodes = 256, kMaxName = 64;
constexpr size_t kMaxArguments = 3, kMaxFields = 32, kMaxTargets = 64, kMaxOpcodes = 64;
constexpr int64_t kMaxExtent = int64_t(1) << 40, kMaxVersion = 1 << 16, kMaxBundleVersion = 999'999'999'999'999, kMaxResource = int64_t(1) << 32;
constexpr int64_t kMaxNumber = (int64_t(1) << 31) - 1;  // in a configuration

template <class Table, class Value>
bool has(Table const& table, Value const& value) {
  return std::find(std::begin(table), std::end(table), value) != std::end(table);
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

bool is_in_word(char c) { return (c >= 'a' && c <= 'z') || is_digit(c) || c == '_'; }

// The name of an input or output. Python checks that it is no keyword.
std::string identifier(Json& json, char const* what) {
  std::string const name = json.text(what, kMaxName);
  auto const fits = [](char c) { return is_letter(c) || is_digit(c) || c == '_'; };
  bool const good = is_letter(name[0]) && std::all_of(name.begin(), name.end(), fits);
  if (!good) throw json.error(std::string(what) + " has a name that it cannot have");
  return name;
}

// A name in lower case, as of an operation. Python knows which there are.
std::string word(Json& json, char const* what) {
  std::string const found = json.text(what, kMaxName);
  if (!std::all_of(found.begin(), found.end(), is_in_word)) throw json.error(std::string(what) + " is not a name in lower case");
  return found;
}

// An operand's type, such as "bf16.row.align1". Python knows which elements and alignments there are.
std::string operand(Json& json, char const* what) {
  std::string const found = json.text(what);
  std::string_view rest = found;
  auto const take_while = [&](auto const& fits) {
    size_t const count = size_t(std::find_if_not(rest.begin(), rest.end(), fits) - rest.begin());
    rest.remove_prefix(count);
    return count;
  };
  auto const take = [&](std::string_view token) {
    bool const is = rest.substr(0, token.size()) == token;
    if (is) rest.remove_prefix(token.size());
    return is;
  };
  bool good = take_while(is_in_word) > 0 && (take(".row") || take(".col"));
  if (take(".align")) {
    size_t const digits = take_while(is_digit);
    good = good && digits > 0 && digits <= 4;
  }
  if (take(".")) good = take_while([](char c) { return is_in_word(c) || c == '.'; }) > 0 && good;  // blocks, promoted
  if (!good || !rest.empty()) throw json.error(std::string(what) + " is not the type of an operand");
  return found;
}

// ---- Configurations ----------------------------------------------------------------------------------------------

// Python knows the fields of each kind of kernels. Here they are part of the text from which a key is hashed.
void config(Json& json) {
  json.object("a configuration", kMaxFields, [&](std::string const& name) {
    char const* const what = name.c_str();
    if (json.next('{')) {
      json.object(what, kMaxArguments, [&](std::string const&) { json.integer(what, 1, kMaxNumber); });
    } else if (json.next('"')) {
      json.text(what);
    } else if (!json.take("true") && !json.take("false")) {
      json.integer(what, -kMaxNumber, kMaxNumber);
    }
  });
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
  }
  fields.end();
  return found;
}

// ---- Epilogues ---------------------------------------------------------------------------------------------------

// Python knows which operations there are, and what they take. Here an epilogue has a text, and names operands.

struct Named {
  std::string name, kind;
};

struct Node {
  std::string op, attribute;
  std::vector<size_t> arguments;
};

struct Output {
  std::string name, kind, reduction;
  size_t node;
};

struct Graph {
  std::vector<Named> inputs;
  std::vector<Node> nodes;
  std::vector<Output> outputs;
};

Node node(Json& json, Graph const& graph) {
  Node found;
  int64_t const last = int64_t(graph.nodes.size()) - 1;
  json.expect("[", "a node, a list,");
  found.op = word(json, "an operation");
  json.expect(",", "the arguments of an operation");
  json.list("arguments", kMaxArguments, [&] { found.arguments.push_back(size_t(json.integer("a node", 0, last))); });
  json.expect(",", "the attribute of an operation");
  if (json.next('"')) {
    found.attribute = json.text("an attribute");
  } else if (!json.take("null")) {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    found.attribute = std::to_string(json.integer("an attribute", -kMost - 1, kMost));
  }
  json.expect("]", "the end of a node");
  return found;
}

Output output(Json& json, Graph const& graph) {
  Output found;
  json.expect("[", "an output, a list,");
  found.name = identifier(json, "an output");
  json.expect(",", "the node of an output");
  found.node = size_t(json.integer("a node", 0, int64_t(graph.nodes.size()) - 1));
  json.expect(",", "the kind of an output");
  found.kind = word(json, "a kind");
  json.expect(",", "the reduction of an output");
  if (!json.take("null")) found.reduction = word(json, "a reduction");
  json.expect("]", "the end of an output");
  return found;
}

Graph graph(Json& json) {
  Graph found;
  std::set<std::string> names;
  auto const own = [&](std::string const& name) {
    if (!names.insert(name).second) throw json.error("two inputs or outputs have the name " + name);
  };
  Fields fields(json, "an epilogue");
  fields.field("inputs");
  json.list("inputs", kMaxInputs, [&] {
    json.expect("[", "an input, a list,");
    std::string name = identifier(json, "an input");
    json.expect(",", "the kind of an input");
    found.inputs.push_back({std::move(name), word(json, "a kind")});
    json.expect("]", "the end of an input");
    own(found.inputs.back().name);
  });
  fields.field("nodes");
  json.list("nodes", kMaxNodes, [&] { found.nodes.push_back(node(json, found)); });
  fields.field("outputs");
  json.list("outputs", kMaxOutputs, [&] {
    bool const first = found.outputs.empty();  // D, of which an input may have the name
    found.outputs.push_back(output(json, found));
    std::string const& name = found.outputs.back().name;
    if (first != (name == "d")) throw json.error("the first output is d, and no other is");
    if (!first) own(name);
  });
  fields.end();
  if (found.outputs.empty()) throw json.error("an epilogue has no outputs");
  return found;
}

// An epilogue as expressions. People and programs identify it by this text.
std::string expressions(Graph const& graph) {
  constexpr size_t kMost = 1000;  // characters; shared subexpressions could make it exponentially long
  std::vector<std::string> nodes;
  for (Node const& node : graph.nodes) {
    std::string arguments;
    for (size_t argument : node.arguments) arguments += (arguments.empty() ? "" : ", ") + nodes[argument];
    // An input and a constant are their attribute.
    std::string expression = arguments.empty() && !node.attribute.empty() ? node.attribute : node.op;
    if (!arguments.empty()) expression += "(" + arguments + (node.attribute.empty() ? "" : ", " + node.attribute) + ")";
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
    bool const known = std::any_of(all.begin(), all.end(), [&](Named const& one) { return one.name == name; });
    if (!known) throw json.error(std::string(what) + " has the type of something else");
    found[name] = operand(json, what);
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
  found.operands.push_back({"a", operand(json, "a")});
  fields.field("b");
  found.operands.push_back({"b", operand(json, "b")});
  declaration.types_a_b = json.since(begin);
  begin = json.at();
  fields.field("d");
  found.operands.push_back({"out", operand(json, "d")});
  fields.field("epilogue");
  Graph const epilogue = graph(json);
  found.epilogue = expressions(epilogue);
  if (fields.has("form")) found.form = one_of(json, "form", {kBatched, kGrouped, kRaggedK});  // the dense form is left out
  if (found.form == kGrouped || found.form == kRaggedK) found.operands.push_back({"offsets", "i32.row.align1"});
  std::vector<Named> further;
  for (size_t i = 1; i < epilogue.outputs.size(); ++i) {
    Output const& output = epilogue.outputs[i];
    further.push_back({output.name, output.kind});
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
  Manifest::Identity identity;
  int64_t source_size;
};

Kernel kernel(Json& json) {
  Kernel found;
  Fields fields(json, "a kernel");
  fields.field("config");
  size_t const begin = json.at();
  config(json);
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
  json.object("sass", kMaxOpcodes, [&](std::string const&) { json.integer("sass", 0, kMaxFile); });
  fields.field("source");
  File const source = file(json, "source");
  found.identity.source = source.sha256, found.source_size = source.size;
  fields.field("target"), found.info.target = json.text("target");
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
    if (!kernel.info.runs_on(given.weight.capability)) throw json.error("a choice names a kernel for another device");
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
  json.object("flags", kMaxTargets, [&](std::string const& target) {
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
  std::string text = "versions " + std::to_string(kAbi) + " " + std::to_string(kTemplates) + " " + std::string(kFormat) + "\nlimits";
  for (int64_t limit : std::initializer_list<int64_t>{kMaxFile, kMaxManifest, kMaxKernels, kMaxChoices, kMaxRows, kMaxTables,
                                                      kMaxFunctions, kMaxExtent, kMaxInputs, kMaxOutputs, kMaxNodes, kMaxName,
                                                      kMaxNumber}) {
    text += " " + std::to_string(limit);
  }
  return text + "\n";
}

}  // namespace cutlass_ops
