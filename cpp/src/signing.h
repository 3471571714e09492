// Ed25519 signatures, as in cutlass_ops/artifacts/signing.py: by OpenSSL, where this was built with it (CUTLASS_OPS_SIGNATURES).

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cutlass_ops {

constexpr size_t kSignature = 64;  // bytes

// Error where this was built without signatures.
void require_signing();

// Refuses a message that was not signed with the private key of one of these public ones, which are PEM files. BundleError if
// it was not, or others may write a key's file; ArgumentError if a file holds no such key; Error where this was built without signatures.
void require_signature(std::string_view message, std::string_view signature, std::vector<std::string> const& public_keys);

}  // namespace cutlass_ops
