//! Settings of `rlhf generate`.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::check::{check_sizes, max_prompt_len};
use super::responses::{ResponsesConfig, SamplerConfig};
use super::rows::RowsConfig;
use crate::environment::EnvironmentConfig;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ANY, Choices, DATA, MODELS, MOST_TOKENS, SAMPLING, Setting, Settings, above_zero, all, any_text, at_least_one,
    defaults, expect, refuse, zero_or_more, zero_to_one,
};
use rlhf_base::weights::brief;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{GenerationConfig, Sampling, StopStrings};
use rlhf_lm::model::{CausalLm, ModelConfig};
use rlhf_lm::tokenizer::Tokenizer;

/// Default maximum number of generated tokens.
const NEW_TOKENS: usize = 53;

/// Fields of `generation_config.json` that have an effect if tokens are sampled.
const SAMPLING_FIELDS: [&str; 4] = ["temperature", "top_k", "top_p", "min_p"];

/// Fields of `generation_config.json` that change responses in transformers and have no effect here, each with the number that means no
/// change, if there is one.
const WITHOUT_EFFECT: [(&str, Option<f64>); 27] = [
    ("num_beams", Some(1.0)),
    ("num_beam_groups", Some(1.0)),
    ("diversity_penalty", Some(0.0)),
    ("constraints", None),
    ("force_words_ids", None),
    ("penalty_alpha", Some(0.0)),
    ("dola_layers", None),
    ("top_h", None),
    ("typical_p", Some(1.0)),
    ("epsilon_cutoff", Some(0.0)),
    ("eta_cutoff", Some(0.0)),
    ("no_repeat_ngram_size", Some(0.0)),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("bad_words_ids", None),
    ("sequence_bias", None),
    ("suppress_tokens", None),
    ("begin_suppress_tokens", None),
    ("forced_bos_token_id", None),
    ("forced_eos_token_id", None),
    ("exponential_decay_length_penalty", None),
    ("guidance_scale", Some(1.0)),
    ("watermarking_config", None),
    ("token_healing", None),
    ("min_length", Some(0.0)),
    ("stop_strings", None),
    ("max_time", None),
];

/// The fields of [`WITHOUT_EFFECT`] that change sampling, and not greedy decoding.
const DRAW_FIELDS: [&str; 4] = ["top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"];

/// Settings of `rlhf generate`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct GenerateConfig {
    /// Causal language model: a folder or a hub name.
    #[setting(alias = "model", heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,

    /// Prompts [default: those of the dataset, else of standard input].
    #[setting(positional, value_name = "PROMPT", parse = any_text)]
    pub prompts: Vec<String>,
    /// Format of standard input: `text`, a prompt per line, or `jsonl`, a row per line as in a dataset.
    #[setting(heading = DATA, default = "text", unlisted)]
    pub input_format: Format,
    /// Format of the output: `text` for reading, `jsonl` for programs [default: text on a terminal, else jsonl].
    #[setting(heading = DATA)]
    pub output_format: Option<Format>,
    /// Put a prompt that is a string into the chat template, as a user message.
    #[setting(heading = DATA, short = "put text prompts into the chat template")]
    pub apply_chat_template: bool,
    /// System message of every conversation that has none.
    #[setting(heading = DATA)]
    pub system_prompt: Option<String>,

    /// Responses to each prompt.
    #[setting(flatten)]
    #[serde(flatten)]
    pub responses: ResponsesConfig,
    /// Minimum tokens of a response [default: the model's `generation_config.json`, else 0].
    #[setting(heading = SAMPLING, most = MOST_TOKENS)]
    pub min_new_tokens: Option<usize>,
    /// Do not stop at the end-of-sequence tokens of the model and its tokenizer.
    #[setting(heading = SAMPLING)]
    pub ignore_eos: bool,
    /// Seed of the sampling.
    #[setting(heading = SAMPLING, default = 42, most = ANY, short = "random seed")]
    pub seed: u64,

    /// Tools and environments, with which a response has several turns.
    #[setting(flatten)]
    #[serde(flatten)]
    pub environment: EnvironmentConfig,
    /// Input and output of rows, and computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rows: RowsConfig,
}

impl GenerateConfig {
    /// Creates a configuration with every default, for this model; set `prompts` or `dataset_name` next.
    pub fn new(model_name_or_path: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config
    }

    /// Returns whether every token is the likeliest one: no sampling, or a temperature of 0.
    pub fn is_greedy(&self) -> bool {
        self.responses.do_sample == Some(false) || self.responses.sampler.temperature == Some(0.0)
    }

    /// Returns whether decoding is greedy because `model_settings`, the model's `generation_config.json`, has sampling settings and no
    /// `do_sample`, as Vicuna's: transformers then takes the likeliest token. If this configuration sets a sampling setting, tokens are
    /// sampled.
    fn is_greedy_by_omission(&self, model_settings: &serde_json::Map<String, Value>) -> bool {
        let SamplerConfig { temperature, top_k, top_p, min_p, .. } = &self.responses.sampler;
        let is_set = temperature.is_some() || top_k.is_some() || top_p.is_some() || min_p.is_some();
        let is_in_file = |name: &&str| model_settings.get(*name).is_some_and(|value| !value.is_null());
        let is_decided = self.responses.do_sample.is_some() || is_in_file(&"do_sample");
        !is_decided && !is_set && self.responses.num_return_sequences == 1 && SAMPLING_FIELDS.iter().any(is_in_file)
    }

    /// Resolves the generation. A setting that is not set is taken from `model_settings`, the `generation_config.json` of the model in
    /// `dir`, which has a context of `context` tokens, or else is rlhf's default. The caller adds the tokens and texts that end a response.
    ///
    /// # Errors
    /// If one of the settings is invalid.
    pub fn generation(
        &self,
        model_settings: &serde_json::Map<String, Value>,
        context: usize,
        dir: &Path,
    ) -> Result<GenerationConfig> {
        let file = ModelDefaults { settings: model_settings, dir };
        let do_sample = match (self.responses.do_sample, file.get(name_of!(self.responses.do_sample))) {
            (Some(set), _) => set,
            (None, None) => !self.is_greedy_by_omission(model_settings),
            (None, Some(found)) => {
                found.as_bool().ok_or_else(|| file.wrong(name_of!(self.responses.do_sample), bool::EXPECTED, found))?
            }
        };
        let mut max_new_tokens =
            file.whole(self.responses.max_new_tokens, name_of!(self.responses.max_new_tokens), NEW_TOKENS)?;
        if self.responses.max_new_tokens.is_none() && max_new_tokens >= context {
            // The files of some models set the whole context, which leaves no tokens for a prompt.
            max_new_tokens = NEW_TOKENS;
        }
        let min_new_tokens = file.whole(self.min_new_tokens, name_of!(self.min_new_tokens), 0)?;
        let sampler = &self.responses.sampler;
        let temperature = file.number(sampler.temperature, name_of!(sampler.temperature), 1.0)?;
        let top_k = file.whole(sampler.top_k, name_of!(sampler.top_k), 0)?;
        let top_p = file.number(sampler.top_p, name_of!(sampler.top_p), 1.0)?;
        let min_p = file.number(sampler.min_p, name_of!(sampler.min_p), 0.0)?;
        let repetition_penalty = file.number(sampler.repetition_penalty, name_of!(sampler.repetition_penalty), 1.0)?;
        let mut resolved = Self { min_new_tokens: Some(min_new_tokens), ..self.clone() };
        resolved.responses.do_sample = Some(do_sample);
        resolved.responses.max_new_tokens = Some(max_new_tokens);
        resolved.responses.sampler = SamplerConfig {
            temperature: Some(temperature),
            top_k: Some(top_k),
            top_p: Some(top_p),
            min_p: Some(min_p),
            repetition_penalty: Some(repetition_penalty),
        };
        resolved.check()?;
        let sampling =
            if resolved.is_greedy() { Sampling::Greedy } else { Sampling::Random { temperature, top_k, top_p, min_p } };
        Ok(GenerationConfig {
            repetition_penalty,
            min_new_tokens,
            num_return_sequences: self.responses.num_return_sequences,
            seed: self.seed,
            batch_size: self.rows.batch_size,
            ..GenerationConfig::new(sampling, max_new_tokens)
        })
    }

    /// Resolves the generation for `model`, which is in the folder `dir`, with the tokens and texts that end a response. Also returns the
    /// maximum length of a prompt, in tokens.
    ///
    /// # Errors
    /// If one of the settings is invalid, or the context of the model is not longer than a response.
    pub fn for_model(&self, model: &CausalLm, tokenizer: &Tokenizer, dir: &Path) -> Result<(GenerationConfig, usize)> {
        let context = model.config().max_position_embeddings;
        let vocab = model.config().vocab_size;
        let mut generation = self.generation(model.config().generation_settings(), context, dir)?;
        let ResponsesConfig { stop_token_ids, stop_strings, .. } = &self.responses;
        if let Some(id) = stop_token_ids.iter().find(|id| !(0..vocab).contains(*id)) {
            return refuse(
                "stop_token_ids",
                format!(" = {id}: expected ids below the vocabulary of {vocab} of {}", dir.display()),
            );
        }
        generation.stop_token_ids.clone_from(stop_token_ids);
        if !self.ignore_eos {
            generation.stop_token_ids.extend(tokenizer.eos_ids());
        }
        if !stop_strings.is_empty() {
            generation.stop_strings = Some(StopStrings::new(tokenizer, stop_strings.clone())?);
        }
        let longest = Self::max_prompt_len(model.config(), generation.max_new_tokens, dir)?;
        Ok((generation, longest))
    }

    /// Returns the maximum length of a prompt, in tokens, before `max_new_tokens` tokens of `model`, which is in `dir`.
    ///
    /// # Errors
    /// If no token is left.
    pub(crate) fn max_prompt_len(model: &ModelConfig, max_new_tokens: usize, dir: &Path) -> Result<usize> {
        let whose = format!(" of {}", dir.display());
        max_prompt_len(model, model.max_position_embeddings, ("max_new_tokens", max_new_tokens), &whose)
    }

    /// Returns a note that names the fields of `model_settings`, the model's `generation_config.json`, that would change the responses of
    /// `generation` in transformers and have no effect here. `None` if there is no such field.
    pub fn note_without_effect(
        &self,
        model_settings: &serde_json::Map<String, Value>,
        generation: &GenerationConfig,
    ) -> Option<String> {
        let is_overridden = |name: &str| match name {
            "min_length" => generation.min_new_tokens > 0,
            "stop_strings" => generation.stop_strings.is_some(),
            _ => generation.sampling == Sampling::Greedy && DRAW_FIELDS.contains(&name),
        };
        let changes = |(name, neutral): &&(&str, Option<f64>)| match model_settings.get(*name) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Number(number)) => neutral.is_none() || number.as_f64() != *neutral,
            Some(Value::Array(values)) => !values.is_empty(),
            Some(Value::Object(values)) => !values.is_empty(),
            Some(Value::String(text)) => !text.is_empty(),
            Some(Value::Bool(true)) => true,
        };
        let fields = WITHOUT_EFFECT.iter().filter(changes).map(|(name, _)| *name);
        let names: Vec<&str> = fields.filter(|name| !is_overridden(name)).collect();
        // Without a `generation_config.json` the settings are from `config.json`.
        let files = ["generation_config.json", "config.json"].map(|name| self.model_name_or_path.join(name));
        let file = files.iter().find(|file| file.is_file()).unwrap_or(&files[0]);
        let others = (!names.is_empty()).then(|| format!("fields without effect here: {}", names.join(", ")));
        let greedy = self.is_greedy_by_omission(model_settings).then(|| {
            let set: Vec<&str> = SAMPLING_FIELDS.into_iter().filter(|name| model_settings.contains_key(*name)).collect();
            format!(
                "no `do_sample`, so the likeliest token is always taken, as in transformers, and {} without effect; --do_sample samples",
                match set.as_slice() {
                    [one] => format!("{one} is"),
                    all => format!("{} are", all.join(", ")),
                }
            )
        });
        let has_all = model_settings.get("do_sample") == Some(&Value::Bool(true))
            && model_settings.get(name_of!(self.responses.sampler.top_k)).is_none_or(Value::is_null)
            && self.responses.sampler.top_k.is_none()
            && generation.sampling != Sampling::Greedy;
        let all = has_all.then(|| {
            "no `top_k`, so all tokens can be sampled, and in transformers the 50 likeliest (--top_k 50)".into()
        });
        let notes: Vec<String> = greedy.into_iter().chain(all).chain(others).collect();
        (!notes.is_empty()).then(|| format!("{}: {}", file.display(), notes.join("; ")))
    }

    /// Returns the note of [`GenerateConfig::note_without_effect`] for `model`, of the folder `dir`.
    ///
    /// # Errors
    /// If one of the settings, or of the model's, is invalid.
    pub fn note_for_model(&self, model: &ModelConfig, dir: &Path) -> Result<Option<String>> {
        let model_settings = model.generation_settings();
        let generation = self.generation(model_settings, model.max_position_embeddings, dir)?;
        Ok(self.note_without_effect(model_settings, &generation))
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        let sources = match (&self.rows.dataset_name, &self.prompts[..]) {
            (Some(dataset), prompts @ [_, ..]) => refuse(
                name_of!(self.rows.dataset_name),
                format!(
                    " = {} and {} prompts of your own exclude each other: give one of them",
                    dataset.display(),
                    prompts.len()
                ),
            ),
            _ => Ok(()),
        };
        let enough = match (self.min_new_tokens, self.responses.max_new_tokens) {
            (Some(least), Some(most)) => {
                expect(least <= most, name_of!(self.min_new_tokens), least, &format!("at most max_new_tokens = {most}"))
            }
            _ => Ok(()),
        };
        let check_if_set = |value: Option<f64>, check: fn(&str, f64) -> Result<()>, name| {
            value.map_or(Ok(()), |value| check(name, value))
        };
        let sequences = self.responses.num_return_sequences;
        let equal = if self.is_greedy() && sequences > 1 {
            refuse(
                name_of!(self.responses.num_return_sequences),
                format!(
                    " = {sequences} would give equal responses, as the likeliest token is always taken; set \
                 num_return_sequences = 1, or do_sample = true with a temperature above 0"
                ),
            )
        } else {
            Ok(())
        };
        let ids =
            self.responses.stop_token_ids.iter().try_for_each(|&id| {
                expect(id >= 0, name_of!(self.responses.stop_token_ids), id, "token ids, 0 or more")
            });
        let endless = self.ignore_eos
            && self.environment.is_used()
            && self.responses.stop_token_ids.is_empty()
            && self.responses.stop_strings.is_empty();
        let ends = if endless {
            refuse(
                name_of!(self.ignore_eos),
                " = true with tools and environments, without stop_token_ids or stop_strings: no turn would end",
            )
        } else {
            Ok(())
        };
        let sampler = &self.responses.sampler;
        all([
            sources,
            ends,
            self.responses
                .max_new_tokens
                .map_or(Ok(()), |most| at_least_one(name_of!(self.responses.max_new_tokens), most)),
            enough,
            at_least_one(name_of!(self.responses.num_return_sequences), sequences),
            check_if_set(sampler.temperature, zero_or_more, name_of!(sampler.temperature)),
            check_if_set(sampler.top_p, above_zero, name_of!(sampler.top_p)),
            check_if_set(sampler.top_p, zero_to_one, name_of!(sampler.top_p)),
            check_if_set(sampler.min_p, zero_to_one, name_of!(sampler.min_p)),
            check_if_set(sampler.repetition_penalty, above_zero, name_of!(sampler.repetition_penalty)),
            equal,
            ids,
            expect(
                !self.responses.stop_strings.iter().any(String::is_empty),
                name_of!(self.responses.stop_strings),
                "\"\"",
                "some text",
            ),
            self.environment.check(),
            self.rows.check(),
        ])
    }
}

/// The `generation_config.json` of the model in `dir`: defaults of settings that are not set.
struct ModelDefaults<'a> {
    settings: &'a serde_json::Map<String, Value>,
    dir: &'a Path,
}

impl ModelDefaults<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.settings.get(name).filter(|value| !value.is_null())
    }

    fn number(&self, set: Option<f64>, name: &str, usual: f64) -> Result<f64> {
        match (set, self.get(name)) {
            (Some(set), _) => Ok(set),
            (None, None) => Ok(usual),
            (None, Some(found)) => found.as_f64().ok_or_else(|| self.wrong(name, f64::EXPECTED, found)),
        }
    }

    fn whole(&self, set: Option<usize>, name: &str, usual: usize) -> Result<usize> {
        match (set, self.get(name)) {
            (Some(set), _) => Ok(set),
            (None, None) => Ok(usual),
            (None, Some(found)) => {
                let number = found.as_u64().and_then(|number| usize::try_from(number).ok());
                number.ok_or_else(|| self.wrong(name, usize::EXPECTED, found))
            }
        }
    }

    fn wrong(&self, name: &str, expected: &str, found: &Value) -> Error {
        let found = brief(&found.to_string()).into_owned();
        Error::invalid(self.dir.join("generation_config.json"), format!("`{name}`: expected {expected}, found {found}"))
    }
}

/// Format of standard input and of output of `rlhf generate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(value_name = "FORMAT")]
pub enum Format {
    /// Plain text, for people.
    Text,
    /// A JSON object per line.
    Jsonl,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::usage_of;
    use serde_json::json;

    #[test]
    fn generation_refuses_two_sources_of_prompts_and_equal_responses() {
        let mut config = GenerateConfig::new("m");
        config.responses.sampler.temperature = Some(0.0);
        config.check().unwrap();
        config.responses.num_return_sequences = 2;
        assert!(usage_of(config.check()).starts_with("num_return_sequences = 2 would give equal responses"));
        config.responses.num_return_sequences = 1;
        config.prompts = vec!["a".into(), "b".into()];
        config.rows.dataset_name = Some("d.jsonl".into());
        assert_eq!(
            usage_of(config.check()),
            "dataset_name = d.jsonl and 2 prompts of your own exclude each other: give one of them"
        );
    }

    #[test]
    fn a_models_file_with_settings_of_sampling_that_does_not_say_it_samples_is_greedy_as_in_transformers() {
        let object = |file: &Value| file.as_object().unwrap().clone();
        let vicuna = object(&json!({"_from_model_config": true, "temperature": 0.9, "top_p": 0.6}));
        let mut config = GenerateConfig::new("m");
        let resolved = |config: &GenerateConfig, file: &serde_json::Map<String, Value>| {
            let generation = config.generation(file, 64, Path::new("m")).unwrap();
            (generation.sampling, config.note_without_effect(file, &generation))
        };
        let (sampling, note) = resolved(&config, &vicuna);
        assert_eq!(sampling, Sampling::Greedy);
        assert_eq!(
            note.unwrap(),
            "m/generation_config.json: no `do_sample`, so the likeliest token is always taken, as in transformers, and temperature, top_p are \
             without effect; --do_sample samples"
        );
        let sampled = Sampling::Random { temperature: 0.9, top_k: 0, top_p: 0.6, min_p: 0.0 };
        config.responses.do_sample = Some(true);
        assert_eq!(resolved(&config, &vicuna), (sampled, None));
        config.responses.do_sample = None;
        // A sampling setting turns sampling on. A file without sampling settings says nothing about it.
        config.responses.sampler.top_k = Some(5);
        assert!(matches!(resolved(&config, &vicuna).0, Sampling::Random { top_k: 5, .. }));
        config.responses.sampler.top_k = None;
        let silent = object(&json!({"_from_model_config": true, "eos_token_id": 2}));
        assert!(matches!(resolved(&config, &silent), (Sampling::Random { .. }, None)));
        let all = resolved(&config, &object(&json!({"do_sample": true, "top_p": 0.9}))).1.unwrap();
        assert!(
            all.contains("no `top_k`, so all tokens can be sampled, and in transformers the 50 likeliest"),
            "{all}"
        );
        assert_eq!(resolved(&config, &object(&json!({"do_sample": true, "top_k": 0}))).1, None);
    }
}
