// Attention of packed sequences of which some continue others, with each token there once; `../src/shared.rs` describes its calls.
//
// The sequences are parts of longer ones. A first call is causal attention within each part, and each further one attention of the tokens
// after some parts to all tokens of those. A call has its own softmax, whose logarithm of the sum (lse) makes it a share of the whole:
//
//   lse = log(sum of exp(lse of a call)),  out = sum of exp(lse of a call - lse) * (out of that call)
//
// Call after call this is, with s = sigmoid(lse of the call - lse), out (1 - s) + (out of the call) s.
//
// The backward pass of a call takes the whole `out` and `lse`: the probabilities exp(score - lse) and the row sums of dout * out are then
// those of the whole softmax, and the gradients of the calls add up (as in ring attention, Liu et al. 2023).
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "common.h"
#include "ordered.h"

extern "C" {

// One call of attention, in a range of queries and a range of keys.
struct tch_ext_attention_call {
  // Offsets of the queries and of the keys of each sequence in these ranges, and their ends, i32.
  const at::Tensor *queries, *keys;
  // Queries of sequences without keys, bool; null: there are none.
  const at::Tensor* blind;
  int64_t first_query, num_queries, first_key, num_keys;
  // The most queries and the most keys of a sequence.
  int64_t most_queries, most_keys;
};

}  // extern "C"

namespace tch_ext {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr size_t NUMBERS = 6;
constexpr double INF = std::numeric_limits<double>::infinity();

struct Call {
  Tensor cum_q, cum_k, blind;
  // In the order of `tch_ext_attention_call`.
  std::array<int64_t, NUMBERS> n;

  Tensor queries_of(const Tensor& x) const { return x.narrow(0, n[0], n[1]); }
  Tensor keys_of(const Tensor& x) const { return x.narrow(0, n[2], n[3]); }
  // [heads, tokens]
  Tensor lse_of(const Tensor& lse) const { return lse.narrow(1, n[0], n[1]); }
  // Flash attention reorders the heads of single queries, which its backward pass does not account for.
  int64_t most_queries() const { return std::max<int64_t>(n[4], 2); }
  int64_t most_keys() const { return n[5]; }
};

// `out` is [queries, heads, head_dim], and `lse` [heads, queries], f32, or f64 of f64. The rest is for the backward pass.
struct Attended {
  Tensor out, lse, random, unused;
};

at::ScalarType wide(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// The operations of the processor, for tests: as those of a GPU, they leave the memory that no sequence covers, and the lse of a query
// without keys is infinite.
namespace plain {

std::vector<int64_t> offsets(const Tensor& cumulative) {
  const Tensor x = cumulative.to(at::kLong).contiguous();
  return {x.const_data_ptr<int64_t>(), x.const_data_ptr<int64_t>() + x.numel()};
}

Tensor untouched(const Tensor& like) { return at::full(like.sizes(), std::numeric_limits<double>::quiet_NaN(), like.options()); }

// `body` gets the first query, the number of queries, the first key and the number of keys of each sequence.
template <typename F>
void for_sequences(const Call& call, const F& body) {
  const auto q = offsets(call.cum_q), k = offsets(call.cum_k);
  TORCH_CHECK(q.size() == k.size(), "attention: ", q.size(), " and ", k.size(), " offsets");
  for (size_t i = 0; i + 1 < q.size(); i++) {
    const int64_t queries = q[i + 1] - q[i], keys = k[i + 1] - k[i];
    // A GPU would leave out the rest.
    TORCH_CHECK(queries <= call.most_queries() && keys <= call.most_keys(), "attention: ", queries, " queries and ", keys, " keys");
    body(q[i], queries, k[i], keys);
  }
}

// [heads, tokens, head_dim] of `count` tokens, in the wide dtype, with the heads of keys and values repeated.
Tensor by_head(const Tensor& x, int64_t first, int64_t count, int64_t heads) {
  const Tensor part = x.narrow(0, first, count).to(wide(x));
  return part.repeat_interleave(heads / x.size(1), 1).transpose(0, 1);
}

// The sum over the query heads of each of the `kv_heads` heads of keys: [heads, tokens, head_dim] to [tokens, kv_heads, head_dim].
Tensor by_token(const Tensor& x, int64_t kv_heads) {
  return x.contiguous().view({kv_heads, x.size(0) / kv_heads, x.size(1), x.size(2)}).sum(1).transpose(0, 1);
}

Tensor scores(const Tensor& q, const Tensor& k, bool causal, double scale) {
  Tensor found = q.matmul(k.transpose(1, 2)) * scale;
  if (causal) {
    const int64_t queries = q.size(1), keys = k.size(1);
    const Tensor later = at::ones({queries, keys}, found.options()).triu(1 + keys - queries);
    found.masked_fill_(later.to(at::kBool), -INF);
  }
  return found;
}

Attended forward(const Tensor& q, const Tensor& k, const Tensor& v, const Call& call, bool causal, double scale) {
  const int64_t heads = q.size(1);
  Attended all{untouched(q), untouched(at::empty({heads, q.size(0)}, q.options().dtype(wide(q)))), {}, {}};
  for_sequences(call, [&](int64_t first_query, int64_t queries, int64_t first_key, int64_t keys) {
    if (queries == 0) return;
    Tensor out = all.out.narrow(0, first_query, queries), lse = all.lse.narrow(1, first_query, queries);
    if (keys == 0) {
      out.zero_();
      lse.fill_(INF);
      return;
    }
    const Tensor found = scores(by_head(q, first_query, queries, heads), by_head(k, first_key, keys, heads), causal, scale);
    lse.copy_(found.logsumexp(-1));
    out.copy_(found.softmax(-1).matmul(by_head(v, first_key, keys, heads)).transpose(0, 1));
  });
  return all;
}

std::array<Tensor, 3> backward(const Tensor& grad, const std::array<Tensor, 3>& qkv, const Tensor& out, const Tensor& lse, const Call& call,
                               bool causal, double scale) {
  const Tensor &q = qkv[0], &k = qkv[1], &v = qkv[2];
  const int64_t heads = q.size(1), kv_heads = k.size(1);
  const std::array<Tensor, 3> all{untouched(q), untouched(k), untouched(v)};
  for_sequences(call, [&](int64_t first_query, int64_t queries, int64_t first_key, int64_t keys) {
    Tensor dq = all[0].narrow(0, first_query, queries), dk = all[1].narrow(0, first_key, keys), dv = all[2].narrow(0, first_key, keys);
    if (queries == 0 || keys == 0) {
      for (Tensor* part : {&dq, &dk, &dv}) part->zero_();
      return;
    }
    const auto of_queries = [&](const Tensor& x) { return by_head(x, first_query, queries, heads); };
    const auto of_keys = [&](const Tensor& x) { return by_head(x, first_key, keys, heads); };
    const Tensor query = of_queries(q), key = of_keys(k), dout = of_queries(grad);
    const Tensor weights = (scores(query, key, causal, scale) - lse.narrow(1, first_query, queries).unsqueeze(-1)).exp();
    const Tensor sums = (dout * of_queries(out)).sum(-1, /*keepdim=*/true);
    const Tensor dscores = weights * (dout.matmul(of_keys(v).transpose(1, 2)) - sums) * scale;
    dq.copy_(dscores.matmul(key).transpose(0, 1));
    dk.copy_(by_token(dscores.transpose(1, 2).matmul(query), kv_heads));
    dv.copy_(by_token(weights.transpose(1, 2).matmul(dout), kv_heads));
  });
  return all;
}

}  // namespace plain

Attended attend(const Tensor& q, const Tensor& k, const Tensor& v, const Call& call, bool causal, double scale) {
  if (!q.is_cuda()) return plain::forward(q, k, v, call, causal, scale);
  const auto [out, lse, random, unused, mask] =
      at::_flash_attention_forward(q, k, v, call.cum_q, call.cum_k, call.most_queries(), call.most_keys(), /*dropout_p=*/0, causal,
                                   /*return_debug_mask=*/false, scale);
  // Earlier versions had [sequences, heads, longest].
  TORCH_CHECK(lse.dim() == 2 && lse.size(0) == q.size(1) && lse.size(1) == q.size(0), "attention: lse ", lse.sizes());
  return {out, lse, random, unused};
}

std::array<Tensor, 3> attend_back(const Tensor& grad, const std::array<Tensor, 3>& qkv, const Attended& whole, const Call& call,
                                  bool causal, double scale) {
  const auto& [q, k, v] = qkv;
  if (!q.is_cuda()) return plain::backward(grad, qkv, whole.out, whole.lse, call, causal, scale);
  const OrderedSums ordered(q);
  const auto [dq, dk, dv] =
      at::_flash_attention_backward(grad, q, k, v, whole.out, whole.lse, call.cum_q, call.cum_k, call.most_queries(), call.most_keys(),
                                    /*dropout_p=*/0, causal, whole.random, whole.unused, scale);
  return {dq, dk, dv};
}

// Makes `out` and `lse` those of their keys and of the call's keys together.
void merge(const Call& call, const Attended& part, const Tensor& out, const Tensor& lse) {
  // A sequence without keys has the output 0, but no share in the sum.
  const Tensor added = call.blind.defined() ? part.lse.masked_fill(call.blind, -INF) : part.lse;
  Tensor before = call.lse_of(lse), rows = call.queries_of(out);
  const Tensor share = (added - before).sigmoid_().t().unsqueeze(-1);
  // Computed in the dtype of the shares and rounded once.
  at::addcmul_out(rows, rows * (1 - share), part.out, share);
  at::logaddexp_out(before, before, added);
}

struct SharedAttention : torch::autograd::Function<SharedAttention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<Call>* calls,
                        double scale) {
    const Attended own = attend(q, k, v, calls->front(), /*causal=*/true, scale);
    // A sum of several parts is rounded once.
    Tensor out = calls->size() > 2 ? own.out.to(own.lse.scalar_type()) : own.out;
    for (size_t i = 1; i < calls->size(); i++) {
      const Call& call = (*calls)[i];
      merge(call, attend(call.queries_of(q), call.keys_of(k), call.keys_of(v), call, /*causal=*/false, scale), out, own.lse);
    }
    out = out.to(q.scalar_type());
    variable_list saved{q, k, v, out, own.lse, own.random, own.unused};
    std::vector<int64_t> numbers;
    for (const Call& call : *calls) {
      saved.insert(saved.end(), {call.cum_q, call.cum_k});
      numbers.insert(numbers.end(), call.n.begin(), call.n.end());
    }
    ctx->save_for_backward(saved);
    ctx->saved_data["numbers"] = numbers;
    ctx->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    at::NoGradGuard no_grad;
    const auto s = ctx->get_saved_variables();
    const auto numbers = ctx->saved_data["numbers"].toIntVector();
    const double scale = ctx->saved_data["scale"].toDouble();
    const Tensor grad = grads[0].contiguous();
    const size_t count = numbers.size() / NUMBERS;
    std::array<Tensor, 3> sums;
    for (size_t i = 0; i < count; i++) {
      Call call{s[7 + 2 * i], s[8 + 2 * i], Tensor(), {}};
      std::copy_n(numbers.begin() + i * NUMBERS, NUMBERS, call.n.begin());
      const Attended whole{call.queries_of(s[3]), call.lse_of(s[4]).contiguous(), s[5], s[6]};
      const auto part = attend_back(call.queries_of(grad), {call.queries_of(s[0]), call.keys_of(s[1]), call.keys_of(s[2])}, whole, call,
                                    /*causal=*/i == 0, scale);
      for (size_t j = 0; j < part.size(); j++) {
        // The first call has all tokens. Two numbers of a narrow dtype are added as exactly in it as in f32.
        if (i == 0) {
          sums[j] = count > 2 ? part[j].to(wide(part[j])) : part[j];
        } else {
          (j == 0 ? call.queries_of(sums[j]) : call.keys_of(sums[j])).add_(part[j]);
        }
      }
    }
    for (size_t j = 0; j < sums.size(); j++) sums[j] = sums[j].to(s[j].scalar_type());
    return {sums[0], sums[1], sums[2], {}, {}};
  }
};

void check(const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<Call>& calls) {
  const bool fits = q.dim() == 3 && k.dim() == 3 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(2) == k.size(2);
  TORCH_CHECK(fits && k.size(1) > 0 && q.size(1) % k.size(1) == 0, "attention: queries ", q.sizes(), ", keys ", k.sizes(), ", values ",
              v.sizes());
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), "attention: ", q.scalar_type(), ", ",
              k.scalar_type(), ", ", v.scalar_type());
  const auto& own = calls.front().n;
  TORCH_CHECK(own[0] == 0 && own[1] == q.size(0) && own[2] == 0 && own[3] == q.size(0), "attention: ", q.size(0),
              " tokens, a tree of ", own[1]);
}

}  // namespace
}  // namespace tch_ext

extern "C" {

char* tch_ext_shared_attention(at::Tensor** out, const at::Tensor* q, const at::Tensor* k, const at::Tensor* v,
                               const tch_ext_attention_call* calls, size_t count, double scale) {
  return tch_ext::guard([&] {
    std::vector<tch_ext::Call> all;
    for (size_t i = 0; i < count; i++) {
      const tch_ext_attention_call& c = calls[i];
      all.push_back({*c.queries, *c.keys, c.blind ? *c.blind : at::Tensor(),
                     {c.first_query, c.num_queries, c.first_key, c.num_keys, c.most_queries, c.most_keys}});
    }
    TORCH_CHECK(!all.empty(), "attention: no calls");
    tch_ext::check(*q, *k, *v, all);
    *out = new at::Tensor(tch_ext::SharedAttention::apply(*q, *k, *v, &all, scale));
  });
}

}  // extern "C"
