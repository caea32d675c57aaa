//! Scores of responses as training takes them, in one place: the sums of the rewards are scaled by running moments, and penalties for
//! responses that do not stop, or are too long, are subtracted. [`shaping`](crate::rl::shaping) clips them as they become rewards.

use crate::reward::{ScoreScaling, ScoreScalingConfig, Scored, Scores};
use crate::rl::groups::Overlong;
use rlhf_lm::generate::{FinishReason, Response};
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// Penalties of responses; `PpoConfig::penalties` resolves them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Penalties {
    pub(crate) unstopped: Option<Unstopped>,
    pub(crate) overlong: Option<Overlong>,
}

/// The score of a response that did not stop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Unstopped {
    /// The score minus this.
    Less(f64),
    /// This instead of all scores of the response's rewards.
    Replaced(f64),
}

impl Unstopped {
    /// Changes the scores of the rows that did not stop, which are the rows that are not `spared`.
    fn apply(self, scores: &mut Scores, spared: &[bool]) {
        match self {
            Self::Less(penalty) => scores.responses = penalize_missing_stop(&scores.responses, spared, penalty),
            Self::Replaced(value) => {
                scores.responses = replace_missing_stop(&scores.responses, spared, value);
                let token_scores = scores.tokens.iter_mut().flatten().zip(spared);
                token_scores.filter(|(_, spared)| !**spared).for_each(|(row, _)| row.fill(0.0));
            }
        }
    }
}

/// `scores` minus `penalty` for each row without a stop token; `[B]`.
pub fn penalize_missing_stop(scores: &Tensor, stopped: &[bool], penalty: f64) -> Tensor {
    let missing = on_device(stopped, scores.device()).logical_not();
    scores - missing.to_kind(Kind::Float) * penalty
}

/// `scores`, with `value` in place of the score of each row without a stop token; `[B]`.
pub fn replace_missing_stop(scores: &Tensor, stopped: &[bool], value: f64) -> Tensor {
    scores.masked_fill(&on_device(stopped, scores.device()).logical_not(), value)
}

/// Makes the scores of responses from the scores of the rewards.
#[derive(Debug)]
pub(crate) struct ScoreMaker {
    /// Running moments of the sums.
    pub(crate) scaling: ScoreScaling,
    pub(crate) penalties: Penalties,
    /// Tokens that end a response: the stop tokens, or eos where none is set.
    ends: Vec<i64>,
}

impl ScoreMaker {
    /// Creates the scoring of a run, without any scores yet.
    pub(crate) fn new(scaling: &ScoreScalingConfig, penalties: Penalties, ends: Vec<i64>) -> Self {
        Self { scaling: ScoreScaling::new(scaling), penalties, ends }
    }

    /// Returns the scores that are trained on, or baselines of them: scales `scored`, and subtracts the penalties. With `training` the
    /// scores are added to the running moments first.
    pub(crate) fn trained(
        &mut self,
        scored: &mut Scored,
        responses: &[Response],
        training: bool,
        device: Device,
    ) -> Scores {
        self.scaling.apply(scored, training);
        self.penalized(scored.to_scores(device), &scored.unscored(), responses)
    }

    /// Returns the whole score of each response minus the penalties, without running moments, `[B]`: comparable over a run.
    pub(crate) fn raw(&self, scored: &Scored, responses: &[Response], device: Device) -> Tensor {
        self.penalized(scored.to_raw_scores(device), &scored.unscored(), responses).responses
    }

    /// Returns the number of tokens that should end a response in the last turn of each response.
    pub(crate) fn num_ends(&self, responses: &[Response]) -> Vec<usize> {
        // Each earlier turn ends with such a token too.
        let last_turn = |r: &Response| r.inserted.last().map_or(0, |span| span.end);
        let count = |r: &Response| r.tokens[last_turn(r)..].iter().filter(|id| self.ends.contains(id)).count();
        responses.iter().map(count).collect()
    }

    /// Subtracts the penalties. A response that ends with a stop string has also stopped, and one that is `unscored` has no score to
    /// lower.
    fn penalized(&self, mut scores: Scores, unscored: &[bool], responses: &[Response]) -> Scores {
        if let Some(unstopped) = self.penalties.unstopped {
            let ends = self.num_ends(responses).into_iter().zip(responses);
            let stopped = ends.map(|(count, r)| count > 0 || r.finish == FinishReason::Stop);
            let spared: Vec<bool> = stopped.zip(unscored).map(|(stopped, unscored)| stopped || *unscored).collect();
            unstopped.apply(&mut scores, &spared);
        }
        if let Some(overlong) = &self.penalties.overlong {
            let row_penalty = |(response, unscored): (&Response, &bool)| {
                if *unscored { 0.0 } else { overlong.penalty(response) }
            };
            let penalties: Vec<f64> = responses.iter().zip(unscored).map(row_penalty).collect();
            scores.responses -= Tensor::from_slice(&penalties).to(scores.responses.device());
            scores.responses = scores.responses.to_kind(Kind::Float);
        }
        scores
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::ComponentScores;
    use rlhf_base::schema::defaults;

    fn response(tokens: &[i64], finish: FinishReason) -> Response {
        Response {
            tokens: tokens.to_vec(),
            logprobs: vec![0.0; tokens.len()],
            finish,
            sets: None,
            inserted: Vec::new(),
        }
    }

    fn scored(scores: &[f64]) -> Scored {
        let component = ComponentScores {
            name: "a".into(),
            scores: scores.to_vec(),
            seconds: 0.0,
            extra: Vec::new(),
            columns: Vec::new(),
        };
        let summed: Vec<f64> = scores.iter().map(|score| if score.is_nan() { 0.0 } else { *score }).collect();
        Scored { responses: summed.clone(), tokens: None, raw: summed, components: vec![component], warning: None }
    }

    fn maker(unstopped: Option<Unstopped>, overlong: Option<Overlong>) -> ScoreMaker {
        ScoreMaker::new(&defaults(), Penalties { unstopped, overlong }, vec![9])
    }

    #[test]
    fn a_missing_stop_lowers_the_score_or_replaces_those_of_all_tokens() {
        let mut scores = Scores {
            responses: Tensor::from_slice(&[3.0f32, 5.0, f32::NAN]),
            tokens: Some(vec![vec![1.0], vec![2.0], vec![4.0]]),
        };
        Unstopped::Replaced(-1.0).apply(&mut scores, &[true, false, false]);
        assert_eq!(Vec::<f32>::try_from(&scores.responses).unwrap(), [3.0, -1.0, -1.0]);
        assert_eq!(scores.tokens, Some(vec![vec![1.0], vec![0.0], vec![0.0]]));
        let mut scores = Scores::from(Tensor::from_slice(&[3.0f32, 5.0]));
        Unstopped::Less(1.5).apply(&mut scores, &[true, false]);
        assert_eq!(Vec::<f32>::try_from(&scores.responses).unwrap(), [3.0, 3.5]);
    }

    #[test]
    fn a_response_stops_by_its_last_turn_or_a_stop_string_and_one_without_a_score_is_not_penalized() {
        let mut two_turns = response(&[9, 1, 1], FinishReason::Length);
        two_turns.inserted = std::iter::once(1..2).collect();
        let responses = [
            response(&[1, 9], FinishReason::Stop),
            response(&[1, 1], FinishReason::Stop),
            two_turns,
            response(&[1, 1], FinishReason::Length),
        ];
        let mut maker = maker(Some(Unstopped::Less(1.0)), None);
        assert_eq!(maker.num_ends(&responses), [1, 0, 0, 0]);
        let mut found = scored(&[2.0, 2.0, 2.0, f64::NAN]);
        let raw = maker.raw(&found, &responses, Device::Cpu);
        let trained = maker.trained(&mut found, &responses, true, Device::Cpu).responses;
        for scores in [raw, trained] {
            assert_eq!(Vec::<f32>::try_from(scores).unwrap(), [2.0, 2.0, 1.0, 0.0]);
        }
    }

    #[test]
    fn long_responses_are_penalized_after_a_missing_stop() {
        let overlong = Overlong { response_length: 4, buffer: 2, factor: 1.0 };
        let maker = maker(Some(Unstopped::Replaced(-3.0)), Some(overlong));
        let responses = [response(&[1, 1, 1], FinishReason::Length), response(&[1, 1, 1, 9], FinishReason::Stop)];
        let raw = maker.raw(&scored(&[5.0, 5.0]), &responses, Device::Cpu);
        assert_eq!(Vec::<f32>::try_from(raw).unwrap(), [-3.5, 4.0]);
    }
}
