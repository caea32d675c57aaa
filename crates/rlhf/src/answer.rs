//! `rlhf generate`: prompts from arguments, a dataset or standard input; answers as text or JSON lines.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::PathBuf;

use rlhf::config::{GenerateConfig, OutputFormat};
use rlhf::data::{Dataset, Prompt};
use rlhf::generate::{GenerationConfig, Response, Sampling, generate};
use rlhf::model::{CausalLm, ModelOptions};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Value, json};

/// Answers the prompts that `config` names.
pub(crate) fn answer(config: &GenerateConfig) -> Result<()> {
    config.check()?;
    if let Some(threads) = config.num_threads {
        tch::set_num_threads(threads as i32);
    }
    if let Some(path) = config.output_file.as_deref().filter(|path| path.exists()) {
        if !config.overwrite_output_file {
            return Err(Error::invalid(path, "the file exists; choose another, or set --overwrite_output_file"));
        }
        let source = config.dataset_name.as_deref().and_then(|source| source.canonicalize().ok());
        if source.is_some_and(|source| path.canonicalize().is_ok_and(|path| path == source)) {
            return Err(Error::Usage(format!("output_file = {} is also the dataset", path.display())));
        }
    }
    let dir = &rlhf::hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
    let tokenizer = Tokenizer::from_pretrained(dir)?;
    let model = CausalLm::from_pretrained(dir, ModelOptions::default())?;
    tokenizer.check_fits(model.config(), dir)?;
    let (context, vocab) = (model.config().max_position_embeddings, model.config().vocab_size);
    let most = context.checked_sub(config.max_new_tokens).filter(|&most| most > 0).ok_or_else(|| {
        Error::Usage(format!(
            "max_new_tokens = {} leaves no room for a prompt in the model's context of {context} tokens",
            config.max_new_tokens
        ))
    })?;
    if let Some(id) = config.stop_token_id.filter(|id| !(0..vocab).contains(id)) {
        return Err(Error::Usage(format!(
            "stop_token_id = {id}: expected an id below the model's vocabulary of {vocab}"
        )));
    }
    let prompts = prompts(config, &tokenizer, vocab, most)?;

    let mut stop_token_ids = match config.stop_token_id {
        Some(id) => vec![id],
        // What the model says, and what its tokenizer says: either ends a text.
        None => model.config().eos_token_ids.iter().copied().chain(tokenizer.eos()).collect(),
    };
    if config.ignore_eos {
        stop_token_ids.clear();
    }
    let sampling = if config.is_greedy() {
        Sampling::Greedy
    } else {
        let (temperature, top_k, top_p) = (config.temperature, config.top_k as i64, config.top_p);
        Sampling::Random { temperature, top_k, top_p }
    };
    let mut out = Output::open(config)?;
    let copies = config.num_return_sequences;
    let bar = progress(prompts.len() * copies, config.output_file.is_some());
    // In slices, so that answers appear, and are written, as they are made.
    let at_once = (config.batch_size / copies).max(1);
    for (part, slice) in prompts.chunks(at_once).enumerate() {
        let rows: Vec<&[i64]> =
            slice.iter().flat_map(|prompt| std::iter::repeat_n(prompt.tokens.as_slice(), copies)).collect();
        let generation = GenerationConfig {
            stop_token_ids: stop_token_ids.clone(),
            seed: config.seed,
            // The draws are keyed by the place of the answer in the whole output, whatever the batch size.
            first_row: (part * at_once * copies) as u64,
            batch_size: config.batch_size,
            ..GenerationConfig::new(sampling, config.max_new_tokens)
        };
        for (i, response) in generate(&model, &rows, &generation)?.iter().enumerate() {
            out.write(&slice[i / copies], response, &tokenizer)?;
        }
        bar.inc(rows.len() as u64);
    }
    bar.finish_and_clear();
    out.finish()
}

/// The prompts: arguments, else the dataset's, else a line of standard input each.
fn prompts(config: &GenerateConfig, tokenizer: &Tokenizer, vocab: i64, most: usize) -> Result<Vec<Prompt>> {
    if let (Some(path), true) = (&config.dataset_name, config.prompts.is_empty()) {
        return Dataset::read(path, "test")?.prompts(tokenizer, vocab, most);
    }
    let (texts, place) = if config.prompts.is_empty() {
        let text = io::read_to_string(io::stdin()).map_err(Error::io("read", "standard input"))?;
        let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        (lines.map(|(line, text)| (format!("line {line}"), text.to_string())).collect::<Vec<_>>(), "standard input")
    } else {
        let arguments = (1..).zip(&config.prompts);
        (arguments.map(|(at, text)| (format!("argument {at}"), text.clone())).collect(), "prompt")
    };
    if texts.is_empty() {
        return Err(Error::Usage("no prompt: give one as an argument, by --dataset_name, or on standard input".into()));
    }
    texts
        .into_iter()
        .map(|(at, text)| {
            let tokens = tokenizer.encode(&text)?;
            if tokens.is_empty() || tokens.len() > most {
                let message = format!(
                    "expected 1 to {most} tokens (the model's context less max_new_tokens = {}), found {}",
                    config.max_new_tokens,
                    tokens.len()
                );
                return Err(Error::Row { path: place.into(), place: at, message });
            }
            Ok(Prompt { tokens, row: json!({"prompt": &text}), text })
        })
        .collect()
}

/// A bar on standard error, where answers go to a file and a person waits.
fn progress(total: usize, to_file: bool) -> indicatif::ProgressBar {
    if to_file && io::stderr().is_terminal() {
        indicatif::ProgressBar::new(total as u64)
    } else {
        indicatif::ProgressBar::hidden()
    }
}

/// Where answers go, and in what form. A file appears whole, when all answers are in it.
struct Output {
    writer: Box<dyn Write>,
    name: PathBuf,
    /// The file that is written, and the name it gets in the end.
    rename: Option<(PathBuf, PathBuf)>,
    format: OutputFormat,
}

impl Output {
    fn open(config: &GenerateConfig) -> Result<Self> {
        let terminal = config.output_file.is_none() && io::stdout().is_terminal();
        let usual = if terminal { OutputFormat::Text } else { OutputFormat::Jsonl };
        let format = config.output_format.unwrap_or(usual);
        let Some(path) = &config.output_file else {
            return Ok(Self {
                writer: Box::new(io::stdout().lock()),
                name: "standard output".into(),
                rename: None,
                format,
            });
        };
        let mut beside = path.clone().into_os_string();
        beside.push(".part");
        let beside = PathBuf::from(beside);
        let file = File::create(&beside).map_err(Error::io("create", &beside))?;
        let rename = Some((beside, path.clone()));
        Ok(Self { writer: Box::new(BufWriter::new(file)), name: path.clone(), rename, format })
    }

    fn write(&mut self, prompt: &Prompt, response: &Response, tokenizer: &Tokenizer) -> Result<()> {
        let text = tokenizer.decode(&response.tokens)?;
        let result = match self.format {
            OutputFormat::Text => writeln!(self.writer, "{}{text}\n", prompt.text),
            OutputFormat::Jsonl => {
                let mut row = json!({
                    "prompt": prompt.text,
                    "response": text,
                    "finish_reason": response.finish,
                    "num_tokens": response.tokens.len(),
                    "token_ids": response.tokens,
                    "logprobs": response.logprobs,
                });
                // Other fields of the dataset's row travel along, so that answers can be joined with what they belong to.
                if let (Value::Object(row), Value::Object(source)) = (&mut row, &prompt.row) {
                    for (key, value) in source {
                        row.entry(key.clone()).or_insert_with(|| value.clone());
                    }
                }
                writeln!(self.writer, "{row}")
            }
        };
        result.map_err(Error::io("write to", &self.name))
    }

    fn finish(mut self) -> Result<()> {
        self.writer.flush().map_err(Error::io("write to", &self.name))?;
        match self.rename {
            Some((from, to)) => std::fs::rename(from, &to).map_err(Error::io("write", to)),
            None => Ok(()),
        }
    }
}
