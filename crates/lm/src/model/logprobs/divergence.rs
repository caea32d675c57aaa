//! Divergence between the next-token distributions of a student and of its teacher, with its gradient. Logits of both models are held for one
//! slice of tokens at a time, and the gradient replaces the student's logits in place.

use super::{
    Distributions, LmHead, LogitsUse, SliceKernels, joined, narrow_rows, row_entropy, uses_kernels, with_rounded_rows,
};
use std::ops::Range;
use tch::{Kind, Tensor};

/// The generalized Jensen-Shannon divergence between the distributions of a teacher and a student over the ids that both have.
///
/// Source: Agarwal et al. 2024, On-Policy Distillation of Language Models, eq. 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    /// Share of the teacher in the mixture: 0 is the KL divergence from teacher to student, 1 that from student to teacher.
    pub beta: f64,
    /// Divides the logits of both.
    pub temperature: f64,
    /// Compares the teacher's likeliest tokens only, this many of them; 0 compares all.
    pub top_k: usize,
    /// With `top_k`: whether all other tokens together are one more outcome; otherwise the others' probabilities are divided among the `top_k`.
    pub tail: bool,
    /// Compares only the log-probabilities of the token in each place. The divergence is their difference, student minus teacher, and its gradient
    /// that of a policy gradient with the negative difference as the advantage. On average over tokens that the student samples, it is the
    /// divergence of `beta` = 1.
    pub sampled: bool,
}

/// Numbers of M tokens, without a gradient; each tensor is `[M]` f32. All are at the temperature of the divergence.
#[derive(Debug)]
pub struct TokenDivergences {
    /// Divergence in the place of each token, in nats.
    pub divergence: Tensor,
    /// Log-probability of each token under the student.
    pub logprobs: Tensor,
    /// Log-probability of each token under the teacher.
    pub teacher_logprobs: Tensor,
    /// Entropy of the student's distribution, in nats.
    pub entropy: Tensor,
}

/// The teacher's distributions that a student is compared with, in the order of the batch.
#[derive(Debug, Clone, Copy)]
pub struct TeacherRows<'a> {
    /// The teacher's distributions.
    pub of: &'a Distributions,
    /// For each sequence of the batch, its index among the sequences of `of`.
    pub rows: &'a [usize],
}

/// Sums of the products of two `[M, width]` tensors, row by row: `[M, 1]`.
fn row_products(a: &Tensor, b: &Tensor) -> Tensor {
    a.unsqueeze(1).bmm(&b.unsqueeze(2)).view([-1, 1])
}

impl Divergence {
    /// Returns the numbers of the tokens `ids` `[n]` with these logits, `[n, vocab]` each, and the gradient of each token's divergence with
    /// respect to the student's logits, `[n, common]`, over the ids that both vocabularies have.
    fn compute(
        &self,
        student: &Tensor,
        teacher: &Tensor,
        ids: &Tensor,
        learns: bool,
    ) -> (TokenDivergences, Option<Tensor>) {
        let common = student.size()[1].min(teacher.size()[1]);
        let logprobs = |logits: &Tensor| {
            let logits = logits.narrow(1, 0, common).to_kind(Kind::Float);
            let logits = if self.temperature == 1.0 { logits } else { logits / self.temperature };
            logits.log_softmax(-1, Kind::Float)
        };
        let (student, teacher) = (logprobs(student), logprobs(teacher));
        let gathered = |all: &Tensor| all.gather(1, &ids.unsqueeze(1), false).squeeze_dim(1);
        let (logprobs, teacher_logprobs, entropy) = (gathered(&student), gathered(&teacher), row_entropy(&student));
        let (divergence, gradient) = if self.sampled {
            let loss = &logprobs - &teacher_logprobs;
            let slopes = learns.then(|| {
                let (ids, ones) = (ids.unsqueeze(1), loss.ones_like().unsqueeze(1));
                // The gradient of a log-probability: 1 for the token itself, less all probabilities.
                (-student.exp()).scatter_add(1, &ids, &ones) * loss.unsqueeze(1)
            });
            (loss, slopes)
        } else if self.top_k > 0 && (self.top_k as i64) < common {
            self.over_top_k(&student, &teacher, learns)
        } else {
            self.over_all(&student, &teacher, learns)
        };
        let numbers = TokenDivergences { divergence, logprobs, teacher_logprobs, entropy };
        // The logits were divided by the temperature: so is their gradient.
        (numbers, gradient.map(|gradient| if self.temperature == 1.0 { gradient } else { gradient / self.temperature }))
    }

    /// The divergence of each row of log-probabilities, `[n]`, and its gradient with respect to the student's logits.
    fn over_all(&self, student: &Tensor, teacher: &Tensor, learns: bool) -> (Tensor, Option<Tensor>) {
        let p = student.exp();
        if self.beta == 0.0 {
            let q = teacher.exp();
            let divergence = row_products(&q, &(teacher - student)).view([-1]);
            return (divergence, learns.then(|| p - q));
        }
        // d = log p - log m, where m is the teacher for beta = 1, else the mixture. The derivative of the whole divergence by log p is
        // (1 - beta) p d, or p d for beta = 1, plus a constant per row, which the softmax removes.
        let (d, teacher_term, share) = if self.beta == 1.0 {
            (student - teacher, None, 1.0)
        } else {
            let mixture = (student + (1.0 - self.beta).ln()).logaddexp(&(teacher + self.beta.ln()));
            let teacher_term = row_products(&teacher.exp(), &(teacher - &mixture)) * self.beta;
            (student - mixture, Some(teacher_term), 1.0 - self.beta)
        };
        let student_term = row_products(&p, &d);
        let divergence = match teacher_term {
            Some(teacher_term) => teacher_term + &student_term * share,
            None => student_term.shallow_clone(),
        };
        (divergence.view([-1]), learns.then(|| p * (d - student_term) * share))
    }

    /// As [`Divergence::over_all`], over the teacher's likeliest tokens.
    fn over_top_k(&self, student: &Tensor, teacher: &Tensor, learns: bool) -> (Tensor, Option<Tensor>) {
        let (teacher, ids) = teacher.topk(self.top_k as i64, -1, true, true);
        let top_student = student.gather(1, &ids, false).detach().set_requires_grad(learns);
        let whole = |part: &Tensor| {
            if !self.tail {
                return part.log_softmax(-1, Kind::Float);
            }
            // The sum stays below 1, so that the rest has a logarithm.
            let sum = part.logsumexp([-1], true).clamp_max(-1e-7);
            Tensor::cat(&[part, &(-sum.expm1()).log()], -1)
        };
        let (divergence, sum) = tch::with_grad(|| {
            let divergence = self.between(&whole(&top_student), &whole(&teacher));
            let sum = divergence.sum(Kind::Float);
            (divergence, sum)
        });
        let gradient = learns.then(|| {
            sum.backward();
            let slope = top_student.grad();
            let total = slope.sum_dim_intlist(-1i64, true, Kind::Float);
            (-student.exp() * total).scatter_add(1, &ids, &slope)
        });
        (divergence.detach(), gradient)
    }

    /// The divergence of each row of log-probabilities, differentiable.
    fn between(&self, student: &Tensor, teacher: &Tensor) -> Tensor {
        let kl = |p: &Tensor, q: &Tensor| (p.exp() * (p - q)).sum_dim_intlist(-1i64, false, Kind::Float);
        if self.beta == 0.0 {
            kl(teacher, student)
        } else if self.beta == 1.0 {
            kl(student, teacher)
        } else {
            let mixture = (student + (1.0 - self.beta).ln()).logaddexp(&(teacher + self.beta.ln()));
            kl(teacher, &mixture) * self.beta + kl(student, &mixture) * (1.0 - self.beta)
        }
    }
}

impl TokenDivergences {
    pub(in crate::model) fn join(parts: &[Self], device: tch::Device) -> Self {
        let all = |part: fn(&Self) -> &Tensor| {
            joined(&parts.iter().map(|numbers| part(numbers).shallow_clone()).collect::<Vec<_>>(), device)
        };
        Self {
            divergence: all(|numbers| &numbers.divergence),
            logprobs: all(|numbers| &numbers.logprobs),
            teacher_logprobs: all(|numbers| &numbers.teacher_logprobs),
            entropy: all(|numbers| &numbers.entropy),
        }
    }
}

impl LmHead {
    /// Logits of rows of hidden states, without a gradient; the same in any slice.
    fn plain_logits(&self, hidden: &Tensor) -> Tensor {
        let count = hidden.size()[0];
        if uses_kernels(self.compute, hidden.device()) {
            self.forward(&with_rounded_rows(hidden)).narrow(0, 0, count)
        } else {
            self.forward(hidden)
        }
    }

    /// Ranges of rows whose logits of both models may be held at once.
    fn joint_slices(&self, teacher: &Self, rows: i64) -> impl Iterator<Item = Range<i64>> + use<> {
        let student_vocab = self.vocab_size();
        // On a CPU, only the student's vocabulary counts.
        let vocab = if self.linear.stored_weight().device().is_cuda() {
            student_vocab.max(teacher.vocab_size())
        } else {
            student_vocab
        };
        self.slices_for(rows, vocab, LogitsUse::DIVERGENCE)
    }

    /// Divergences in the place of the tokens `ids` `[M]` at the hidden states of both models, without a gradient.
    pub(in crate::model) fn divergences(
        &self,
        hidden: &Tensor,
        teacher: (&Distributions, &Tensor),
        ids: &Tensor,
        divergence: &Divergence,
    ) -> TokenDivergences {
        let slice = |range: Range<i64>| {
            let student_logits = self.plain_logits(&narrow_rows(hidden, &range));
            let teacher_logits = teacher.0.head.plain_logits(&narrow_rows(teacher.1, &range));
            divergence.compute(&student_logits, &teacher_logits, &narrow_rows(ids, &range), false).0
        };
        let slices = self.joint_slices(&teacher.0.head, hidden.size()[0]);
        let parts: Vec<TokenDivergences> = tch::no_grad(|| slices.map(slice).collect());
        TokenDivergences::join(&parts, hidden.device())
    }

    /// As [`LmHead::divergences`], with the gradient of the sum of the divergences, each times its weight of `weights` `[M]`, with respect to
    /// the hidden states `[M, embedding size]`. The gradient of the head's weight is accumulated.
    pub(in crate::model) fn divergence_gradient(
        &self,
        hidden: &Tensor,
        teacher: (&Distributions, &Tensor),
        ids: &Tensor,
        (divergence, weights): (&Divergence, &Tensor),
    ) -> (TokenDivergences, Tensor) {
        let gradient = hidden.zeros_like();
        let by_kernels = self.softcap.is_none() && uses_kernels(self.compute, hidden.device());
        let mut kernels = by_kernels.then(|| SliceKernels::new(self));
        let mut parts = Vec::new();
        for range in self.joint_slices(&teacher.0.head, hidden.size()[0]) {
            let (hidden, mut hidden_gradient) = (narrow_rows(hidden, &range).detach(), narrow_rows(&gradient, &range));
            let ids = narrow_rows(ids, &range);
            let count = range.end - range.start;
            let teacher_logits = tch::no_grad(|| teacher.0.head.plain_logits(&narrow_rows(teacher.1, &range)));
            let slopes = |logits: &Tensor| {
                let (numbers, slopes) =
                    tch::no_grad(|| divergence.compute(&logits.detach(), &teacher_logits, &ids, true));
                let slopes = slopes.expect("it was asked for") * narrow_rows(weights, &range).unsqueeze(1);
                // Ids that the teacher does not have get no gradient.
                let above = logits.size()[1] - slopes.size()[1];
                let slopes = if above > 0 { slopes.constant_pad_nd([0, above]) } else { slopes };
                (numbers, slopes.to_kind(logits.kind()))
            };
            parts.push(match &mut kernels {
                Some(kernels) => {
                    let (padded, all) = kernels.logits(&hidden);
                    let mut logits = all.narrow(0, 0, count);
                    let (numbers, slopes) = slopes(&logits);
                    logits.copy_(&slopes);
                    kernels.finish(&padded, &all, count, &mut hidden_gradient);
                    numbers
                }
                None => {
                    let hidden = hidden.set_requires_grad(true);
                    let logits = self.forward(&hidden);
                    let (numbers, slopes) = slopes(&logits);
                    tch_ext::backward(&logits, &slopes);
                    hidden_gradient.copy_(&hidden.grad());
                    numbers
                }
            });
        }
        (TokenDivergences::join(&parts, hidden.device()), gradient)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::linear::Linear;
    use super::*;
    use std::path::Path;
    use tch::Device;

    fn random(size: [i64; 2], step: f64) -> Tensor {
        let numbers = Tensor::arange(size[0] * size[1], (Kind::Float, Device::Cpu));
        (numbers * step).sin().view(size)
    }

    fn head(vocab: i64, width: i64, step: f64) -> LmHead {
        let linear = Linear::new(random([vocab, width], step), None, Kind::Float);
        LmHead { linear, scale: 1.0, softcap: None, compute: Kind::Float }
    }

    fn largest(x: &Tensor, y: &Tensor) -> f64 {
        (x - y).abs().max().double_value(&[])
    }

    #[test]
    fn divergences_and_their_gradients_are_those_of_trl_for_each_beta_temperature_and_top_k() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/trl_distill");
        let runs: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(dir.join("runs.json")).unwrap()).unwrap();
        let stored = Tensor::read_safetensors(dir.join("final.safetensors")).unwrap();
        let stored = |name: &str| {
            let name = format!("losses.{name}");
            stored.iter().find(|(key, _)| *key == name).unwrap_or_else(|| panic!("{name}")).1.shallow_clone()
        };
        let (student, teacher) = (stored("student"), stored("teacher"));
        let ids = Tensor::from_slice(&[0i64, 5, 40, 7, 9, 11]);
        let cases = runs["losses"].as_array().unwrap();
        assert!(cases.len() > 16);
        for (at, case) in cases.iter().enumerate() {
            let number = |name: &str| case[name].as_f64().unwrap();
            let divergence = Divergence {
                beta: number("beta"),
                temperature: number("temperature"),
                top_k: number("top_k") as usize,
                tail: case["tail"].as_bool().unwrap(),
                sampled: false,
            };
            let (found, gradient) = tch::no_grad(|| divergence.compute(&student, &teacher, &ids, true));
            let (loss, slopes) = (stored(&format!("{at}.loss")), stored(&format!("{at}.gradient")));
            assert!(largest(&found.divergence, &loss) < 1e-5, "{case}: {}", largest(&found.divergence, &loss));
            assert!(largest(&gradient.unwrap(), &slopes) < 1e-5, "{case}");
        }
    }

    #[test]
    fn slices_of_heads_with_other_widths_and_vocabularies_have_the_gradients_of_autograd() {
        let (width, wide) = (8, 12);
        // The first are two slices.
        for (rows, vocab, teacher_vocab) in [(300, 32000, 31900), (5, 40, 48)] {
            let (student, teacher) = (head(vocab, width, 7.0), head(teacher_vocab, wide, 5.0));
            let common = vocab.min(teacher_vocab);
            let (hidden, states) = (random([rows, width], 3.0), random([rows, wide], 2.0));
            let distributions = Distributions::new(&teacher, &states, &[rows], false);
            let ids = Tensor::arange(rows, (Kind::Int64, Device::Cpu)) * 3;
            let weights = Tensor::arange(rows, (Kind::Float, Device::Cpu)).sin() / rows as f64;
            let divergence = Divergence { beta: 0.3, temperature: 0.7, top_k: 0, tail: true, sampled: false };
            assert!(rows < 100 || student.slices(rows).count() > 1);
            let weight = student.linear.stored_weight().set_requires_grad(true);
            let (found, gradient) =
                student.divergence_gradient(&hidden, (&distributions, &states), &ids, (&divergence, &weights));
            let weight_gradient = weight.grad().copy();
            // Again, with all logits at once.
            let leaf = hidden.copy().set_requires_grad(true);
            let weight_leaf = weight.detach().copy().set_requires_grad(true);
            let all = |logits: Tensor| (logits.narrow(1, 0, common) / 0.7).log_softmax(-1, Kind::Float);
            let (s, t) =
                (all(leaf.matmul(&weight_leaf.tr())), all(states.matmul(&teacher.linear.stored_weight().tr())));
            let mixture = (s.exp() * 0.7 + t.exp() * 0.3).log();
            let kl = |p: &Tensor| (p.exp() * (p - &mixture)).sum_dim_intlist(-1i64, false, Kind::Float);
            let expected = kl(&t) * 0.3 + kl(&s) * 0.7;
            (&expected * &weights).sum(Kind::Float).backward();
            assert!(largest(&found.divergence, &expected) < 1e-5, "{}", largest(&found.divergence, &expected));
            assert!(largest(&gradient, &leaf.grad()) < 1e-7, "{:e}", largest(&gradient, &leaf.grad()));
            assert!(
                largest(&weight_gradient, &weight_leaf.grad()) < 1e-6,
                "{:e}",
                largest(&weight_gradient, &weight_leaf.grad())
            );
            // Without a gradient the numbers are the same.
            let again = student.divergences(&hidden, (&distributions, &states), &ids, &divergence);
            assert!(largest(&again.divergence, &found.divergence) < 1e-6);
            assert!(largest(&again.teacher_logprobs, &found.teacher_logprobs) < 1e-6);
        }
    }

    #[test]
    fn sampled_tokens_have_the_policy_gradient_of_autograd_over_the_ids_of_both_vocabularies() {
        for (vocab, teacher_vocab) in [(40, 48), (48, 40)] {
            let (student, teacher) = (head(vocab, 8, 7.0), head(teacher_vocab, 12, 5.0));
            let (hidden, states) = (random([5, 8], 3.0), random([5, 12], 2.0));
            let distributions = Distributions::new(&teacher, &states, &[5], false);
            let ids = Tensor::arange(5, (Kind::Int64, Device::Cpu)) * 3;
            let weights = Tensor::arange(5, (Kind::Float, Device::Cpu)).sin();
            let divergence = Divergence { beta: 1.0, temperature: 0.7, top_k: 0, tail: true, sampled: true };
            let (found, gradient) =
                student.divergence_gradient(&hidden, (&distributions, &states), &ids, (&divergence, &weights));
            let leaf = hidden.copy().set_requires_grad(true);
            let all = |logits: Tensor| (logits.narrow(1, 0, 40) / 0.7).log_softmax(-1, Kind::Float);
            let gathered = |all: Tensor| all.gather(1, &ids.unsqueeze(1), false).squeeze_dim(1);
            let (s, t) = (gathered(all(student.forward(&leaf))), gathered(all(teacher.forward(&states))));
            let advantages = &t - s.detach();
            (-(advantages * &s * &weights)).sum(Kind::Float).backward();
            assert!(largest(&found.divergence, &(s - t)) < 1e-5);
            assert!(largest(&gradient, &leaf.grad()) < 1e-6, "{:e}", largest(&gradient, &leaf.grad()));
        }
    }

    #[test]
    fn a_soft_cap_takes_part_in_the_gradient() {
        let capped = LmHead { softcap: Some(2.0), ..head(40, 8, 7.0) };
        let (hidden, states) = (random([5, 8], 3.0), random([5, 8], 2.0));
        let teacher = head(40, 8, 5.0);
        let distributions = Distributions::new(&teacher, &states, &[5], false);
        let ids = Tensor::arange(5, (Kind::Int64, Device::Cpu));
        let divergence = Divergence { beta: 1.0, temperature: 1.0, top_k: 0, tail: true, sampled: false };
        let weights = Tensor::ones([5], (Kind::Float, Device::Cpu));
        let (_, gradient) =
            capped.divergence_gradient(&hidden, (&distributions, &states), &ids, (&divergence, &weights));
        let leaf = hidden.copy().set_requires_grad(true);
        let s = capped.forward(&leaf).log_softmax(-1, Kind::Float);
        let t = teacher.forward(&states).log_softmax(-1, Kind::Float);
        (s.exp() * (&s - t)).sum(Kind::Float).backward();
        assert!(largest(&gradient, &leaf.grad()) < 1e-6);
    }
}
