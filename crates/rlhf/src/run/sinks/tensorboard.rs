//! The sink of TensorBoard's event files.

use crate::run::event::{Event, Sample, SampleSource};
use crate::run::sinks::Reached;
use crate::run::tensorboard::TensorBoard;
use crate::run::tracking::TensorboardTags;
use rlhf_base::Result;
use rlhf_lm::generate::FinishReason;
use serde_json::{Map, Value};
use std::path::Path;

/// Writes metrics, responses and hyperparameters to a TensorBoard event file.
pub(crate) struct TensorBoardSink {
    file: TensorBoard,
    tags: TensorboardTags,
}

impl TensorBoardSink {
    /// Creates a new event file in `dir`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn create(dir: &Path, tags: TensorboardTags) -> Result<Self> {
        Ok(Self { file: TensorBoard::create(dir)?, tags })
    }

    /// Returns the names of the metrics.
    pub(crate) fn tags(&self) -> TensorboardTags {
        self.tags
    }

    /// Removes the events after the update that the run has `reached` from the event files in `dir`.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) fn cut(dir: &Path, reached: Reached) -> Result<()> {
        if reached.updates > 0 { TensorBoard::cut(dir, reached.recorded as i64) } else { Ok(()) }
    }

    /// Writes the settings of the run as hyperparameters.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn settings(&mut self, settings: &Map<String, Value>) -> Result<()> {
        self.file.hyperparameters(settings)
    }

    /// Writes scalars, or a table of responses.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn receive(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Update { step, metrics } => {
                let tagged = metrics.iter().filter(|(name, _)| *name != "step");
                let tagged: Vec<(String, f64)> = tagged.map(|(name, value)| (self.tags.tag(name), value)).collect();
                self.file.scalars(*step as i64, tagged.iter().map(|(tag, value)| (tag.as_str(), *value)))
            }
            Event::Samples { step, source: SampleSource::SamplePrompts, samples, .. } => {
                self.file.text(*step as i64, "samples", &markdown(samples))
            }
            Event::Samples { step, source: SampleSource::Rollout, samples, .. } => {
                self.file.text(*step as i64, "samples/answers", &markdown(samples))
            }
            Event::Evaluation { step, evaluation, .. } => {
                self.file.text(*step as i64, "samples/eval", &markdown(&evaluation.samples))
            }
            _ => Ok(()),
        }
    }
}

/// Returns a Markdown table of `samples`.
fn markdown(samples: &[Sample]) -> String {
    let cell = |text: &str| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('|', "&#124;").replace('`', "&#96;");
        text.replace("\r\n", "\n").replace('\n', "<br>")
    };
    let mut text = String::from("| prompt | response | score | tokens | ended by |\n|---|---|---|---|---|\n");
    for sample in samples {
        let tokens = sample.num_tokens.map_or(String::new(), |tokens| tokens.to_string());
        let end = sample.finish_reason.map_or("", |finish| match finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        let (prompt, response) = (cell(&sample.prompt), cell(&sample.shown()));
        text.push_str(&format!("| {prompt} | {response} | {:.3} | {tokens} | {end} |\n", sample.score));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn samples_are_a_markdown_table_for_any_text() {
        let sample = Sample {
            prompt: "a|b\n<i>".into(),
            response: "`x`".into(),
            score: 0.5,
            components: BTreeMap::new(),
            extra: BTreeMap::new(),
            finish_reason: Some(FinishReason::Stop),
            num_tokens: Some(12),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            turns: None,
            conversation: None,
        };
        let text = markdown(&[sample]);
        assert_eq!(text.lines().last(), Some("| a&#124;b<br>&lt;i> | &#96;x&#96; | 0.500 | 12 | stop |"));
        assert_eq!(text.lines().count(), 3);
    }
}
