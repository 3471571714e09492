// Ed25519 signatures, as in cutlass_ops/artifacts/signing.py, if this was built with OpenSSL (CUTLASS_OPS_SIGNATURES).

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cutlass_ops {

constexpr size_t kSignature = 64;  // bytes

// Throws Error if this was built without signatures.
void require_signing();

// Checks that a message is signed with one of these keys, which are PEM files. Throws BundleError if it is not, or others may
// write a key's file; ArgumentError if a file has no public key; Error if this was built without signatures.
void require_signature(std::string_view message, std::string_view signature, std::vector<std::string> const& public_keys);

}  // namespace cutlass_ops
