//! Layers with a state of a fixed size in the place of attention: their sizes and the names of their tensors.

/// A layer's part that carries a state from token to token, in the place of attention to all tokens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixing {
    /// A gated short convolution (LFM2): of three projections of the input the first times the third goes through a convolution over the
    /// last `kernel` tokens, and its result times the second is the output.
    ShortConv {
        /// Number of tokens that the convolution reads, the token itself included.
        kernel: i64,
        /// Whether the convolution and the projections have biases.
        bias: bool,
    },
    /// The gated delta rule (Qwen3.5, Qwen3-Next): a matrix for each head, which decays and is corrected towards each token's value.
    GatedDelta(GatedDelta),
}

/// Sizes of a layer with the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedDelta {
    /// Number of query and key heads.
    pub key_heads: i64,
    /// Number of value heads, a multiple of `key_heads`; each has a state.
    pub value_heads: i64,
    /// Width of a query or key.
    pub key_dim: i64,
    /// Width of a value.
    pub value_dim: i64,
    /// Number of tokens that the convolution before the delta rule reads, the token itself included.
    pub kernel: i64,
}

impl GatedDelta {
    /// Width of all queries, equal to the width of all keys.
    pub(super) fn keys(&self) -> i64 {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    pub(super) fn values(&self) -> i64 {
        self.value_heads * self.value_dim
    }

    /// Width that the convolution reads: queries, keys and values.
    pub(super) fn convolved(&self) -> i64 {
        2 * self.keys() + self.values()
    }
}

/// A pass through a layer with a state, as its memory depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixedPass {
    /// Tokens that go through the linear layers.
    pub(super) computed: f64,
    /// Tokens of all sequences.
    pub(super) attended: f64,
    /// Number of sequences, and length of the longest.
    pub(super) rows: [f64; 2],
    /// Bytes of a number in the dtype of products.
    pub(super) kind: f64,
    /// Whether kernels compute it, or libtorch's own operations.
    pub(super) has_kernels: bool,
    /// Whether the weights learn.
    pub(super) trains: bool,
}

impl MixedPass {
    /// Tokens that go through the convolution and the delta rule: kernels compute those that sequences have in common once too.
    fn mixed(self) -> f64 {
        if self.has_kernels { self.computed } else { self.attended }
    }
}

/// Number of tokens that the delta rule computes together.
const CHUNK: f64 = 64.0;

impl GatedDelta {
    /// Bytes of the tensors of the delta rule's chunks that libtorch's own operations store: `delta_rule` line by line.
    fn chunk_bytes(&self, pass: MixedPass) -> f64 {
        let [rows, width] = pass.rows;
        let chunks = (width / CHUNK).ceil();
        let tokens = rows * chunks * CHUNK * self.value_heads as f64;
        let (keys, values) = (self.key_dim as f64, self.value_dim as f64);
        // Products of keys, and of queries and keys, before and after their decays; the decays.
        let squares = 5.0 * CHUNK;
        // Queries and keys, with strengths, with decays and solved; values, their corrections, and those less the state's.
        let states = rows * chunks * self.value_heads as f64 * keys * values;
        4.0 * (tokens * (squares + 6.0 * keys + 3.0 * values) + states)
    }

    /// Bytes that the threads of the kernel's backward pass have: the states before each chunk of a sequence.
    fn scratch_bytes(&self, pass: MixedPass) -> f64 {
        let tasks = pass.rows[0] * self.key_heads as f64;
        let threads = tasks.min(f64::from(tch::get_num_threads()));
        let group = (self.value_heads / self.key_heads) as f64;
        let states = ((pass.rows[1] / CHUNK).ceil() + 2.0) * group * (self.key_dim * self.value_dim) as f64;
        let chunk = CHUNK * (8.0 * self.key_dim as f64 + 8.0 * self.value_dim as f64 + 6.0 * CHUNK);
        threads * 4.0 * (states + chunk)
    }
}

impl Mixing {
    /// Number of tokens that the convolution reads.
    pub(super) fn kernel(&self) -> i64 {
        match self {
            Self::ShortConv { kernel, .. } => *kernel,
            Self::GatedDelta(delta) => delta.kernel,
        }
    }

    /// Width that the convolution reads, in a model of this hidden size.
    pub(super) fn convolved(&self, hidden_size: i64) -> i64 {
        match self {
            Self::ShortConv { .. } => hidden_size,
            Self::GatedDelta(delta) => delta.convolved(),
        }
    }

    /// Width of the input of the output projection.
    pub(super) fn width_out(&self, hidden_size: i64) -> i64 {
        match self {
            Self::ShortConv { .. } => hidden_size,
            Self::GatedDelta(delta) => delta.values(),
        }
    }

    /// Heads of the state of one sequence, width of their keys and of their values; `None`: there is only the convolution's state.
    pub(super) fn memory(&self) -> Option<[i64; 3]> {
        match self {
            Self::ShortConv { .. } => None,
            Self::GatedDelta(delta) => Some([delta.value_heads, delta.key_dim, delta.value_dim]),
        }
    }

    /// Whether the output projection has a bias.
    pub(super) fn out_bias(&self) -> bool {
        matches!(self, Self::ShortConv { bias: true, .. })
    }

    /// Bytes that a layer stores for its backward pass in the place of attention's; it follows `Mixer::forward` line by line.
    pub(super) fn stored_bytes(&self, hidden_size: i64, pass: MixedPass) -> f64 {
        let (hidden, MixedPass { computed: n, kind, .. }) = (hidden_size as f64, pass);
        let m = pass.mixed();
        // The inputs of the convolution in f32, moved by each number of tokens that it looks back, if its weight learns.
        let taps = if pass.trains { self.kernel() as f64 } else { 0.0 };
        let convolved = m * self.convolved(hidden_size) as f64 * 4.0 * taps;
        match self {
            // The three parts, the result of the convolution, and the input of the output projection.
            Self::ShortConv { .. } if !pass.has_kernels => {
                convolved + m * hidden * (3.0 * kind + 4.0) + n * hidden * kind
            }
            Self::GatedDelta(delta) if !pass.has_kernels => {
                let (wide, values) = (delta.convolved() as f64, delta.values() as f64);
                // Before and after the non-linearity of the convolution, and decays and strengths with their projections.
                let mixed = m * (wide * (kind + 8.0) + 24.0 * delta.value_heads as f64);
                let widened = if kind < 4.0 { 4.0 } else { 0.0 };
                convolved + mixed + delta.chunk_bytes(pass) + n * values * (16.0 + 2.0 * kind + widened)
            }
            // The three parts, and the input of the output projection.
            Self::ShortConv { .. } => m * 3.0 * hidden * kind + n * hidden * kind,
            Self::GatedDelta(delta) => {
                let (wide, values) = (delta.convolved() as f64, delta.values() as f64);
                // Before and after the convolution, and decays and strengths with their projections.
                let mixed = m * (wide * (kind + 4.0) + 24.0 * delta.value_heads as f64);
                // The outputs before and after the norm, the gate, and their product.
                let widened = if kind < 4.0 { 4.0 } else { 0.0 };
                mixed + n * values * (8.0 + 2.0 * kind + widened)
            }
        }
    }

    /// Bytes in use at once in a layer's backward pass, in addition to [`Mixing::stored_bytes`].
    pub(super) fn working_bytes(&self, hidden_size: i64, pass: MixedPass) -> f64 {
        let (m, kind) = (pass.mixed(), pass.kind);
        match self {
            Self::ShortConv { .. } if !pass.has_kernels => m * 4.0 * hidden_size as f64 * 4.0,
            Self::ShortConv { .. } => m * 4.0 * hidden_size as f64 * kind,
            Self::GatedDelta(delta) if !pass.has_kernels => delta.chunk_bytes(pass),
            Self::GatedDelta(delta) => {
                m * (delta.convolved() as f64 * (4.0 + kind) + delta.values() as f64 * 8.0) + delta.scratch_bytes(pass)
            }
        }
    }

    /// Bytes of the state of one sequence in a layer: the last inputs of the convolution in a dtype of `kind` bytes, and matrices in f32.
    pub(super) fn state_bytes(&self, hidden_size: i64, kind: usize) -> usize {
        let memory = self.memory().map_or(0, |sizes| 4 * sizes.iter().product::<i64>());
        (self.kernel() * self.convolved(hidden_size) * kind as i64 + memory) as usize
    }
}

/// Names of the tensors of such a layer.
#[derive(Debug, Clone, Copy)]
pub struct MixingNames {
    /// The projections of the input.
    pub inputs: MixingInputs,
    /// The convolution.
    pub conv: &'static str,
    /// The output projection.
    pub out: &'static str,
}

/// Names of the projections of the input.
#[derive(Debug, Clone, Copy)]
pub enum MixingInputs {
    /// One product with the three parts of a short convolution.
    Parts(&'static str),
    /// Of the gated delta rule: queries, keys and values; the gate of the output; the strengths of corrections; the decays. And the rates of
    /// decay, its biases, and the norm of the output.
    Separate {
        /// The four projections.
        linears: [&'static str; 4],
        /// The tensors `A_log` and `dt_bias`, and the norm.
        rest: [&'static str; 3],
    },
    /// As `Separate`, in two products: queries, keys, values and gates of each key head in turn; strengths and decays of each key head.
    Grouped {
        /// The two projections.
        linears: [&'static str; 2],
        /// The tensors `A_log` and `dt_bias`, and the norm.
        rest: [&'static str; 3],
    },
}
