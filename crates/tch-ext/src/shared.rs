//! Attention of packed sequences of which some continue others, where each token is there once: prompts that several responses share.
//!
//! The sequences, [`PackedRows`], are parts of longer ones, in the order of a walk through the tree that they are: after a part come all
//! tokens that continue it, directly or not. So each token attends to its own part, up to itself, and to all of the parts that this one
//! continues. The first is one call of attention with a causal mask. For the rest there is one call for each depth of the tree: the
//! tokens after each part of this depth are the queries of a sequence, and the part has its keys. Both are ranges of the packed tokens,
//! so nothing is copied, where responses to a prompt would need the prompt's keys and values once for each. A GPU's flash attention takes
//! such sequences, whose numbers of queries and of keys differ.

use crate::PackedRows;
use crate::memory::on_device;
use crate::ops::new_tensor;
use std::ffi::c_char;
use std::ptr::null;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

#[repr(C)]
struct RawCall {
    queries: *const C_tensor,
    keys: *const C_tensor,
    blind: *const C_tensor,
    first_query: i64,
    num_queries: i64,
    first_key: i64,
    num_keys: i64,
    most_queries: i64,
    most_keys: i64,
}

unsafe extern "C" {
    fn tch_ext_shared_attention(
        out: *mut *mut C_tensor,
        q: *const C_tensor,
        k: *const C_tensor,
        v: *const C_tensor,
        calls: *const RawCall,
        count: usize,
        scale: f64,
    ) -> *mut c_char;
}

/// The tokens of packed sequences as the calls of attention that [`shared_attention`] makes.
#[derive(Debug)]
pub struct PrefixTree {
    calls: Vec<Call>,
}

/// Sequences of queries and of keys, each in one range of the tokens; a sequence may have none of either.
#[derive(Debug, PartialEq, Eq)]
struct Sequences {
    first_query: i64,
    first_key: i64,
    /// Offsets of the sequences' queries in their range, and its end.
    queries: Vec<i64>,
    /// The same of the keys.
    keys: Vec<i64>,
}

impl Sequences {
    /// Sequences that attend to themselves.
    fn own(starts: &[i64]) -> Self {
        Self { first_query: 0, first_key: 0, queries: starts.to_vec(), keys: starts.to_vec() }
    }

    /// For each of several parts, in their order, its start, its end, and the end of the tokens that continue it: these attend to the part.
    fn after(parts: &[[i64; 3]]) -> Self {
        let [first_key, first_query, _] = parts[0];
        let (mut queries, mut keys) = (vec![0], vec![0]);
        for (at, &[start, end, last]) in parts.iter().enumerate() {
            if at > 0 {
                // Between two parts are keys that no query of this call attends to, and queries that attend to no key of it.
                let before = queries[queries.len() - 1];
                queries.extend([before, end - first_query]);
                keys.extend([start - first_key; 2]);
            }
            queries.push(last - first_query);
            keys.push(end - first_key);
        }
        Self { first_query, first_key, queries, keys }
    }

    /// Which queries belong to a sequence without keys; `None` if none does.
    fn blind(&self) -> Option<Vec<bool>> {
        let lens = |offsets: &[i64]| offsets.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
        let sequences = lens(&self.queries).into_iter().zip(lens(&self.keys));
        let blind = sequences.flat_map(|(queries, keys)| std::iter::repeat_n(keys == 0, queries as usize));
        let blind: Vec<bool> = blind.collect();
        blind.contains(&true).then_some(blind)
    }
}

/// [`Sequences`] on a device.
#[derive(Debug)]
struct Call {
    queries: Tensor,
    keys: Tensor,
    blind: Option<Tensor>,
    /// First query, number of queries, first key, number of keys.
    ranges: [i64; 4],
    /// The most queries and the most keys of a sequence.
    most: [i64; 2],
}

impl Call {
    fn new(sequences: &Sequences, device: Device) -> Self {
        let offsets =
            |offsets: &[i64]| on_device(&offsets.iter().map(|&offset| offset as i32).collect::<Vec<_>>(), device);
        let most = |offsets: &[i64]| offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let Sequences { first_query, first_key, queries, keys } = sequences;
        Self {
            queries: offsets(queries),
            keys: offsets(keys),
            blind: sequences.blind().map(|blind| on_device(&blind, device)),
            ranges: [*first_query, queries[queries.len() - 1], *first_key, keys[keys.len() - 1]],
            most: [most(queries), most(keys)],
        }
    }

    fn raw(&self) -> RawCall {
        let [first_query, num_queries, first_key, num_keys] = self.ranges;
        RawCall {
            queries: self.queries.as_ptr(),
            keys: self.keys.as_ptr(),
            blind: self.blind.as_ref().map_or(null(), Tensor::as_ptr),
            first_query,
            num_queries,
            first_key,
            num_keys,
            most_queries: self.most[0],
            most_keys: self.most[1],
        }
    }
}

/// The depth of each part in the tree, and the number of the part after all that continue it.
fn walked(parents: &[i64]) -> Vec<(usize, usize)> {
    let mut found = vec![(0, parents.len()); parents.len()];
    let mut path: Vec<usize> = Vec::new();
    for (part, &parent) in parents.iter().enumerate() {
        while let Some(&last) = path.last().filter(|&&last| last as i64 != parent) {
            found[last].1 = part;
            path.pop();
        }
        assert!(
            parent < 0 || !path.is_empty(),
            "expected each part after its parent and all that continue it, found {parents:?}"
        );
        found[part].0 = path.len();
        path.push(part);
    }
    found
}

/// The calls for parts with these offsets and parents: the parts themselves, then each depth of the tree at which some are continued.
fn sequences_of(starts: &[i64], parents: &[i64]) -> Vec<Sequences> {
    let found = walked(parents);
    let continued = |depth: usize| {
        let parts = found.iter().enumerate().filter(move |&(part, &(of, next))| of == depth && next > part + 1);
        let parts = parts.map(|(part, &(_, next))| [starts[part], starts[part + 1], starts[next]]);
        Some(parts.collect::<Vec<_>>()).filter(|parts| !parts.is_empty())
    };
    let further = (0..).map_while(continued).map(|parts| Sequences::after(&parts));
    std::iter::once(Sequences::own(starts)).chain(further).collect()
}

impl PrefixTree {
    /// The tree of `packed` among `tokens` tokens on `device`: the tokens after the last sequence are padding, which attends to itself.
    ///
    /// # Panics
    /// If a sequence does not come directly after the one that it continues and all others that continue that one; if there are too few
    /// tokens.
    pub fn new(packed: PackedRows<'_>, tokens: i64, device: Device) -> Self {
        let mut starts = packed.starts.to_vec();
        let mut parents = packed.parents.map_or_else(|| vec![-1; starts.len() - 1], <[i64]>::to_vec);
        let end = starts[starts.len() - 1];
        assert!(parents.len() + 1 == starts.len() && end <= tokens, "expected {packed:?} among {tokens} tokens");
        if end < tokens {
            starts.push(tokens);
            parents.push(-1);
        }
        let calls = sequences_of(&starts, &parents).iter().map(|sequences| Call::new(sequences, device)).collect();
        Self { calls }
    }
}

/// Attention of each token to those of its sequence up to itself, where sequences continue others as `tree` has it. Returns
/// `[N, heads, head_dim]` in the dtype of `q`. Differentiable in `q`, `k` and `v`.
///
/// `q` is `[N, heads, head_dim]`; `k` and `v` have their own number of heads. On a GPU, which computes it by libtorch's flash attention,
/// all are f16 or bf16. On the processor plain operations compute the same, slowly, for tests.
///
/// # Panics
/// If shapes, dtypes or devices are incompatible, or the GPU has no flash attention.
pub fn shared_attention([q, k, v]: [&Tensor; 3], scale: f64, tree: &PrefixTree) -> Tensor {
    let calls: Vec<RawCall> = tree.calls.iter().map(Call::raw).collect();
    let (q, k, v) = (q.as_ptr(), k.as_ptr(), v.as_ptr());
    // SAFETY: all pointers are to tensors that this call borrows; the shim copies their handles and checks shapes, dtypes and the number
    // of tokens, and the ranges of a tree are within its tokens.
    new_tensor(|out| unsafe { tch_ext_shared_attention(out, q, k, v, calls.as_ptr(), calls.len(), scale) })
}

/// [`shared_attention`] one sequence after another, each with a copy of all tokens before it, by libtorch's operations: for comparison.
pub(crate) fn attention_along_paths([q, k, v]: [&Tensor; 3], scale: f64, packed: PackedRows<'_>) -> Tensor {
    let parents = packed.parents.expect("the sequences have parents");
    let (mut paths, mut outputs): (Vec<Vec<i64>>, Vec<Tensor>) = (Vec::new(), Vec::new());
    for (part, &parent) in packed.starts.windows(2).zip(parents) {
        let own = part[1] - part[0];
        let mut path = usize::try_from(parent).map_or_else(|_| Vec::new(), |parent| paths[parent].clone());
        path.extend(part[0]..part[1]);
        let (len, index) = (path.len() as i64, on_device(&path, q.device()));
        let by_head = |x: &Tensor| {
            let group = q.size()[1] / x.size()[1];
            x.index_select(0, &index).transpose(0, 1).repeat_interleave_self_int(group, 0, None::<i64>)
        };
        let scores = by_head(q).matmul(&by_head(k).transpose(1, 2)) * scale;
        let later = Tensor::ones([len, len], (Kind::Bool, q.device())).triu(1);
        let weights = scores.masked_fill(&later, f64::NEG_INFINITY).softmax(-1, q.kind());
        outputs.push(weights.matmul(&by_head(v)).transpose(0, 1).narrow(0, len - own, own));
        paths.push(path);
    }
    Tensor::cat(&outputs, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets and parents of a random tree, with at most 4 sequences on a path; many have a single token.
    fn random_tree(seed: u64) -> (Vec<i64>, Vec<i64>) {
        let mut state = 2 * seed + 1;
        let mut draw = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let (mut starts, mut parents, mut path) = (vec![0], Vec::new(), Vec::<i64>::new());
        for part in 0..2 + draw(10) {
            path.truncate(draw(path.len().min(3) + 1));
            parents.push(path.last().copied().unwrap_or(-1));
            path.push(part as i64);
            starts.push(starts[part] + [1, 1, 2, 5][draw(4)]);
        }
        (starts, parents)
    }

    fn numbers(shape: &[i64], frequency: f64) -> Tensor {
        let count: i64 = shape.iter().product();
        (Tensor::arange(count, (Kind::Double, Device::Cpu)) * frequency + frequency).sin().view(shape) * 2.0
    }

    #[test]
    fn tokens_that_are_there_once_have_the_outputs_and_gradients_of_whole_sequences() {
        for seed in 0..40 {
            let (mut starts, mut parents) = random_tree(seed);
            // None, one or two tokens of padding.
            let (end, padding) = (starts[parents.len()], seed as i64 % 3);
            let tokens = end + padding;
            let trees = PrefixTree::new(PackedRows { starts: &starts, parents: Some(&parents) }, tokens, Device::Cpu);
            if padding > 0 {
                starts.push(tokens);
                parents.push(-1);
            }
            for (kind, [heads, kv_heads], tolerance) in [
                (Kind::Double, [3, 3], 1e-10),
                (Kind::Double, [4, 2], 1e-10),
                (Kind::Float, [4, 1], 1e-5),
                (Kind::BFloat16, [2, 1], 3e-2),
            ] {
                let inputs = [(heads, 0.37), (kv_heads, 0.73), (kv_heads, 0.51)]
                    .map(|(heads, frequency)| numbers(&[tokens, heads, 8], frequency).to_kind(kind));
                let slopes = numbers(&[tokens, heads, 8], 0.29).to_kind(kind);
                let run = |is_shared: bool| {
                    let kind = if is_shared { kind } else { Kind::Double };
                    let leaves = inputs.each_ref().map(|x| x.to_kind(kind).copy().set_requires_grad(true));
                    let packed = PackedRows { starts: &starts, parents: Some(&parents) };
                    let out = if is_shared {
                        shared_attention(leaves.each_ref(), 0.4, &trees)
                    } else {
                        attention_along_paths(leaves.each_ref(), 0.4, packed)
                    };
                    assert_eq!(out.kind(), kind);
                    crate::backward(&out, &slopes.to_kind(kind));
                    let [dq, dk, dv] = leaves.each_ref().map(Tensor::grad);
                    [out.detach(), dq, dk, dv].map(|x| x.to_kind(Kind::Double))
                };
                let (found, expected) = (run(true), run(false));
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let gap = (found - expected).abs().max().double_value(&[]);
                    let size = expected.abs().max().double_value(&[]).max(1.0);
                    // Not `gap > ..`: NaN is not close.
                    let close = gap <= tolerance * size;
                    assert!(close, "tree {seed}, {kind:?}, {heads} heads of {kv_heads}, tensor {i}: {gap:e} of {size}");
                }
            }
        }
    }

    #[test]
    fn parts_that_are_continued_are_the_keys_of_all_tokens_after_them_one_call_for_each_depth() {
        // 0..2 | 2..3 | 3..4 | 4..6 | 6..7 and 7..8 | 8..9 | 9..10, as in the test of a layout's parts.
        let starts = [0, 2, 3, 4, 6, 7, 8, 9, 10];
        let found = sequences_of(&starts, &[-1, 0, 1, 1, 0, -1, 5, 5]);
        assert_eq!(walked(&[-1, 0, 1, 1, 0, -1, 5, 5])[..3], [(0, 5), (1, 4), (2, 3)]);
        assert_eq!(found.len(), 3);
        assert_eq!(found[0], Sequences::own(&starts));
        // Queries 2..7 have the keys 0..2; then come the keys 2..7 without queries, query 7 without keys, and queries 8..10 with key 7.
        let (queries, keys) = (vec![0, 5, 5, 6, 8], vec![0, 2, 7, 7, 8]);
        assert_eq!(found[1], Sequences { first_query: 2, first_key: 0, queries, keys });
        assert_eq!(found[1].blind(), Some([vec![false; 5], vec![true], vec![false; 2]].concat()));
        // Queries 3..6 have key 2.
        assert_eq!(found[2], Sequences { first_query: 3, first_key: 2, queries: vec![0, 3], keys: vec![0, 1] });
        assert_eq!(found[2].blind(), None);
        let call = Call::new(&found[1], Device::Cpu);
        assert_eq!((call.ranges, call.most), ([2, 8, 0, 8], [5, 5]));
        assert_eq!(sequences_of(&[0, 3, 5], &[-1, -1]), [Sequences::own(&[0, 3, 5])]);
    }

    #[test]
    #[should_panic(expected = "expected each part after its parent")]
    fn a_part_that_stands_apart_from_its_parent_is_refused() {
        // The third continues the first, but the second, which does not, stands between them.
        sequences_of(&[0, 1, 2, 3], &[-1, -1, 0]);
    }
}
