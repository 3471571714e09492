#include "signing.h"

#include "cutlass_ops/bundle.h"
#include "files.h"

#if CUTLASS_OPS_SIGNATURES

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

namespace cutlass_ops {
namespace {

constexpr int64_t kMaxKey = 64 << 10;  // bytes; an Ed25519 key has about 110

template <auto Free>
struct Freed {
  template <class T>
  void operator()(T* value) const {
    Free(value);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;

// OpenSSL has one list of errors per thread, which may hold errors of the program.
class Errors {
 public:
  Errors() { ERR_set_mark(); }
  ~Errors() { ERR_pop_to_mark(); }
  Errors(Errors const&) = delete;
  Errors& operator=(Errors const&) = delete;
};

// Public keys have no password. Without this, OpenSSL would ask for one on the terminal.
int no_password(char*, int, int, void*) { return -1; }

Key read_key(std::string const& path) {
  if (path.empty()) throw ArgumentError("a path of a public key is empty: name a PEM file");
  std::string const text = read_file(path, kMaxKey);
  std::unique_ptr<BIO, Freed<BIO_free>> const memory(BIO_new_mem_buf(text.data(), int(text.size())));
  Key key(memory == nullptr ? nullptr : PEM_read_bio_PUBKEY(memory.get(), nullptr, &no_password, nullptr));
  if (key == nullptr) throw ArgumentError(path + " has no usable public key: an Ed25519 key in PEM is needed");
  if (EVP_PKEY_base_id(key.get()) != EVP_PKEY_ED25519) {
    throw ArgumentError(path + " must be an Ed25519 key in PEM, but has another kind of key");
  }
  return key;
}

std::vector<Key> read_keys(std::vector<std::string> const& paths) {
  std::vector<Key> keys;
  for (std::string const& path : paths) keys.push_back(read_key(path));
  return keys;
}

bool is_by(EVP_PKEY* key, std::string_view message, std::string_view signature) {
  auto const bytes = [](std::string_view data) { return reinterpret_cast<unsigned char const*>(data.data()); };
  std::unique_ptr<EVP_MD_CTX, Freed<EVP_MD_CTX_free>> const context(EVP_MD_CTX_new());
  return context != nullptr && EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key) == 1 &&
         EVP_DigestVerify(context.get(), bytes(signature), signature.size(), bytes(message), message.size()) == 1;
}

}  // namespace

void require_signing() {}

void require_signature(std::string_view message, std::string_view signature, std::vector<std::string> const& public_keys) {
  Errors const errors;
  // Read all keys first: an unusable key is a mistake, whichever key signed.
  for (Key const& key : read_keys(public_keys)) {
    if (signature.size() == kSignature && is_by(key.get(), message, signature)) return;
  }
  std::string names;
  for (std::string const& path : public_keys) names += (names.empty() ? "" : " or ") + path;
  throw BundleError("the signature is not from the key in " + names + ", or the manifest was changed");
}

}  // namespace cutlass_ops

#else

namespace cutlass_ops {

void require_signing() {
  throw Error("a public key is given, and this program was built without signatures: install OpenSSL's headers (libssl-dev) "
              "and configure it with -DCUTLASS_OPS_SIGNATURES=ON");
}

void require_signature(std::string_view, std::string_view, std::vector<std::string> const&) { require_signing(); }

}  // namespace cutlass_ops

#endif
