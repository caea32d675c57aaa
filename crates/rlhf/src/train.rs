//! The loops: supervised fine-tuning, the reward model, PPO. Each reads top to bottom.

pub mod pipeline;
pub mod ppo;
pub mod reward;
pub mod sft;

use crate::Result;
use crate::data::{Cursor, Dataset, Sources, prompt_field};
use crate::device::use_threads;
use crate::hub::Commits;
use crate::metrics::Metrics;
use crate::model::{BASE_MODEL, Dtype, ModelOptions, Param, Precision};
use crate::optim::AdamW;
use crate::optim::loss_scale::LossScaler;
use crate::run::checkpoint::{Best, Checkpoints, OPTIMIZER, Saved, Start, is_due};
use crate::run::inputs::Inputs;
use crate::run::report::{Console, Reached, Reporter};
use crate::settings::{DataConfig, EvalConfig, RunConfig, TrainPlan};
use crate::terminal;
use crate::weights::write_text;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;

/// The name of loss scales in a checkpoint's state.
const LOSS_SCALE: &str = "loss_scale";

/// How far a run of SFT or of a reward model is, whose updates take one optimizer step each.
struct Progress<T> {
    /// Updates done.
    done: usize,
    optimizer: AdamW,
    /// What the loss is scaled by, where the model computes in f16.
    scaler: Option<LossScaler>,
    cursor: Cursor,
    /// Sums since the last line of metrics.
    since: T,
    /// The last update that a line of metrics was due after: a line that an early end brings is none of the whole run's.
    recorded: usize,
    best: Option<Best>,
    /// What a checkpoint keeps that no update changes.
    fixed: Map<String, Value>,
    /// The state of all that after the last whole update: an error may come in the midst of one.
    whole: Map<String, Value>,
}

impl<T: Default + Serialize + for<'a> Deserialize<'a>> Progress<T> {
    fn new(optimizer: AdamW, cursor: Cursor, eval: &EvalConfig, run: &RunConfig, fixed: Map<String, Value>) -> Self {
        let (since, best) = (T::default(), Best::new(eval));
        let scaler = run.fp16.then(|| LossScaler::new(&run.loss_scale));
        let mut begun = Self { done: 0, optimizer, scaler, cursor, since, recorded: 0, best, fixed, whole: Map::new() };
        begun.note_whole();
        begun
    }

    /// What the loss is to be multiplied by.
    fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// One optimizer step; gives the norm of the gradients before clipping, or 0 where they overflowed f16 and no step was taken.
    fn step(&mut self, lr: f64) -> Result<f64> {
        let scale = self.loss_scale();
        if let Some(scaler) = &mut self.scaler {
            if scaler.overflows_at(self.optimizer.grad_norm() / scale) {
                self.optimizer.zero_grad();
                return Ok(0.0);
            }
            self.optimizer.unscale(scale);
        }
        self.optimizer.step(lr)
    }

    /// Whether every update took its step, or left it out for an overflow: else an error came in the midst of one.
    fn is_whole(&self) -> bool {
        let overflows = self.scaler.as_ref().map_or(0, LossScaler::overflows);
        self.optimizer.steps() + overflows as i64 == self.done as i64
    }

    fn push_loss_scale(&self, metrics: &mut Metrics) {
        if let Some(scaler) = &self.scaler {
            metrics.push("loss_scale", scaler.scale());
            metrics.push("overflows", scaler.overflows() as f64);
        }
    }

    /// Goes to where `saved` was written, but for the model; gives what a person should know.
    fn load(
        &mut self,
        saved: &Saved,
        run: &RunConfig,
        in_place: bool,
        inputs: &Inputs,
        plan: &TrainPlan,
    ) -> Result<Vec<String>> {
        let warnings = saved.check_inputs(&run.checkpoints, inputs, plan.num_updates, plan.batch_size)?;
        load_cursor(&mut self.cursor, saved, run)?;
        self.since = saved.parsed("since")?;
        self.recorded = saved.parsed("recorded").unwrap_or(saved.state.update);
        if let (Some(scaler), Ok(state)) = (&mut self.scaler, saved.part(LOSS_SCALE)) {
            scaler.load_state(state).map_err(|e| crate::Error::invalid(&saved.dir, e.to_string()))?;
        }
        // The best model of a run in another folder lies there.
        if let (Some(best), Ok(state), true) = (&mut self.best, saved.part("best"), in_place) {
            best.load_state(state);
        }
        self.optimizer.load(&saved.dir.join(OPTIMIZER))?;
        self.done = saved.state.update;
        self.note_whole();
        Ok(warnings)
    }

    /// Counts a whole update; the sums go with a line of metrics.
    fn advance(&mut self, told: bool) {
        self.done += 1;
        if told {
            self.since = T::default();
            self.recorded = self.done;
        }
        self.note_whole();
    }

    /// Takes note of the state of all that: an update is whole.
    fn note_whole(&mut self) {
        self.whole = self.fixed.clone();
        self.whole.extend([
            ("cursor".into(), self.cursor.state()),
            ("since".into(), json!(self.since)),
            ("recorded".into(), self.recorded.into()),
        ]);
        self.whole.extend(self.best.as_ref().map(|best| ("best".into(), best.state())));
        self.whole.extend(self.scaler.as_ref().map(|scaler| (LOSS_SCALE.into(), scaler.state())));
    }

    /// How far the run is.
    fn reached(&self) -> Reached {
        Reached { updates: self.done, recorded: self.recorded }
    }
}

/// Takes the cursor to where it was in `saved`.
fn load_cursor(cursor: &mut Cursor, saved: &Saved, run: &RunConfig) -> Result<()> {
    let state = saved.part("cursor")?;
    let loaded = match run.checkpoints.resume_with_changed_inputs {
        true => cursor.load_place(state),
        false => cursor.load_state(state),
    };
    loaded.map_err(|e| crate::Error::invalid(&saved.dir, e.to_string()))
}

/// What comes after an update.
struct Due {
    /// The rows that are held out are evaluated on.
    evaluation: bool,
    /// The metric of the best model is looked at.
    look: bool,
    /// A line of metrics is written.
    line: bool,
}

/// Writes the checkpoints of such a run; `write` writes its model to a folder.
struct Saver<'a> {
    checkpoints: Checkpoints,
    write: &'a dyn Fn(&Path) -> Result<()>,
}

impl Saver<'_> {
    fn save<T>(&mut self, progress: &Progress<T>, report: &Reporter<'_>) -> Result<()> {
        report.sync()?;
        self.checkpoints.save(progress.done, Map::new(), progress.whole.clone(), |dir| {
            (self.write)(dir)?;
            progress.optimizer.save(&dir.join(OPTIMIZER))
        })
    }

    /// What comes after the `done`th of `total` updates; a line of metrics every `logging_steps` of them.
    fn due<T>(
        &self,
        progress: &Progress<T>,
        eval: &EvalConfig,
        logging_steps: usize,
        done: usize,
        total: usize,
    ) -> Due {
        let evaluation = is_due(eval.eval_steps, done, total);
        let look = if eval.eval_steps.is_some() { evaluation } else { self.checkpoints.is_due(done) };
        let look = look && progress.best.is_some();
        // What is looked at, or found by an evaluation, stands in a line.
        Due { evaluation, look, line: look || evaluation || is_due(Some(logging_steps), done, total) }
    }

    /// Keeps the model as the best one where the chosen metric says so.
    fn keep_best<T>(
        &self,
        progress: &mut Progress<T>,
        metrics: &Metrics,
        look: bool,
        report: &mut Reporter<'_>,
    ) -> Result<()>
    where
        T: Default + Serialize + for<'a> Deserialize<'a>,
    {
        let Some(best) = &mut progress.best else { return Ok(()) };
        let missed = best.look(metrics, progress.done, look, false)?;
        progress.note_whole();
        missed.iter().for_each(|warning| report.warn(warning));
        self.write_best(progress, report)
    }

    /// Writes the best model, if it is the one of now and is not written yet: after a write that failed, also when the run goes
    /// on from there.
    fn write_best<T>(&self, progress: &mut Progress<T>, report: &mut Reporter<'_>) -> Result<()>
    where
        T: Default + Serialize + for<'a> Deserialize<'a>,
    {
        let Some(best) = &mut progress.best else { return Ok(()) };
        let written = best.write(self.checkpoints.dir(), progress.done, self.write)?;
        progress.note_whole();
        written.iter().for_each(|dir| report.saved(dir));
        Ok(())
    }

    /// Writes the checkpoint that is due, if one is.
    fn after_update<T>(&mut self, progress: &Progress<T>, report: &Reporter<'_>) -> Result<()> {
        if self.checkpoints.is_due(progress.done) { self.save(progress, report) } else { Ok(()) }
    }

    /// Writes a checkpoint where the run ended early; gives how many updates are done.
    fn at_end<T>(&mut self, ended: Result<()>, progress: &Progress<T>, report: &mut Reporter<'_>) -> Result<usize>
    where
        T: Default + Serialize + for<'a> Deserialize<'a>,
    {
        let wanted = progress.is_whole() && self.checkpoints.is_wanted_at_end(progress.done);
        leave_checkpoint(ended.map(|()| progress.done), wanted, report, |report| self.save(progress, report))
    }
}

/// How a run ends that `wanted` to leave a checkpoint: as it `ended`, or in the error of the checkpoint.
fn leave_checkpoint(
    ended: Result<usize>,
    wanted: bool,
    report: &mut Reporter<'_>,
    save: impl FnOnce(&mut Reporter<'_>) -> Result<()>,
) -> Result<usize> {
    match (if wanted { save(report) } else { Ok(()) }, ended) {
        (Ok(()), ended) => ended,
        (Err(unsaved), Ok(_)) => Err(unsaved),
        (Err(unsaved), Err(error)) => {
            report.warn(&format!("no checkpoint at the end: {unsaved}"));
            Err(error)
        }
    }
}

/// Begins to tell of a run of `num_updates`: what to be warned of, where it goes on from.
fn begin_report(
    run: &RunConfig,
    start: &Start,
    num_updates: usize,
    reached: Reached,
    warnings: &[String],
    console: Console,
) -> Result<Reporter<'static>> {
    let report = Reporter::resume(run, num_updates, reached, console)?;
    start.warnings.iter().chain(warnings).for_each(|warning| report.warn(warning));
    start.finished(num_updates).iter().for_each(|warning| report.warn(warning));
    start.describe(run, num_updates).iter().for_each(|note| report.note(note));
    Ok(report)
}

/// What a run is computed by, for the head of its console output.
fn describe_machine(run: &RunConfig, device: tch::Device) -> [(&'static str, String); 2] {
    let threads = tch::get_num_threads();
    let threads = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
    let device = match device {
        tch::Device::Cuda(number) => format!("cuda:{number}, {threads} on the processor"),
        _ => format!("cpu, {threads}"),
    };
    let dtype = match (run.bf16, run.fp16) {
        (true, _) => "bfloat16; the optimizer's weights are float32",
        (false, true) => "float16; the optimizer's weights are float32",
        (false, false) => "float32",
    };
    [("device", device), ("dtype", dtype.into())]
}

/// A prompt of the most characters that a command line is shown with.
const MOST_SHOWN: usize = 200;

/// The command line that tries the language model in `dir`, with a prompt like that of `row`, a row of its data; of a long
/// prompt, or where there is no text, `rlhf generate` asks for one.
fn command_to_try(dir: &Path, row: Option<&Value>, max_new_tokens: Option<usize>) -> Vec<String> {
    let mut words = ["generate", "--model_name_or_path"].map(String::from).to_vec();
    words.insert(0, terminal::program());
    words.push(dir.display().to_string());
    let asked = |messages: &Value| {
        let messages = messages.as_array()?;
        let last = messages.iter().rev().find(|message| message["role"] == "user")?;
        Some(last["content"].as_str().map(String::from))
    };
    let of_text = |row: &Value| {
        let text = row.get("text")?.as_str()?;
        Some(text.split_whitespace().take(4).collect::<Vec<_>>().join(" "))
    };
    let (prompt, is_chat) = match row {
        None => (None, false),
        Some(row) => match prompt_field(row).map(|(_, prompt)| prompt).or_else(|| row.get("messages")) {
            Some(Value::String(prompt)) => (Some(prompt.clone()), false),
            Some(messages) => asked(messages).map_or((None, false), |prompt| (prompt, true)),
            None => (of_text(row), false),
        },
    };
    if is_chat {
        words.push("--apply_chat_template".into());
    }
    if let Some(most) = max_new_tokens {
        words.extend(["--max_new_tokens".into(), most.to_string()]);
    }
    let fits = |prompt: &String| {
        !prompt.is_empty() && prompt.chars().count() <= MOST_SHOWN && !prompt.chars().any(char::is_control)
    };
    if let Some(prompt) = prompt.filter(fits) {
        words.extend(prompt.starts_with('-').then(|| "--".into()));
        words.push(prompt);
    }
    words
}

/// How a model that a run trains is read: what is trained whole is held in f32, whatever its file has.
fn trained_options(options: ModelOptions, gets_adapter: bool) -> ModelOptions {
    let dtype = match options.dtype {
        Dtype::Auto if !gets_adapter => Dtype::Float32,
        other => other,
    };
    ModelOptions { dtype, ..options }
}

/// What to tell of a model whose numbers are not those of the files in `dir`, as some were rounded: when they were read, or
/// where the base of an adapter is saved.
fn roundings(dir: &Path, dtype: Dtype, was_rounded: bool, rounded_base: Option<tch::Kind>) -> Vec<String> {
    let (dir, mut found) = (dir.display(), Vec::new());
    if was_rounded {
        let name = dtype.name();
        found.push(format!(
            "{dir}: dtype = {name} rounds weights that the files hold in another: the run begins at the rounded ones"
        ));
    }
    if let Some(kind) = rounded_base {
        let name = Dtype::of(kind).name();
        found.push(format!(
            "{dir}: beside an adapter its weights are computed with in {name}, and {BASE_MODEL}, which the run saves, holds \
             them so, rounded"
        ));
    }
    found
}

/// Evaluates before the first update, and records it as step 0.
///
/// # Errors
/// Those of `evaluate`; if the metrics cannot be written.
fn record_start(report: &mut Reporter<'_>, evaluate: impl FnOnce(&mut Metrics) -> Result<()>) -> Result<()> {
    report.phase("evaluating");
    let mut metrics = Metrics::default();
    metrics.push("step", 0.0);
    metrics.push("epoch", 0.0);
    evaluate(&mut metrics)?;
    report.record_alone(0, &metrics)
}

/// How many of a model's numbers are trained, and their share, as PEFT's `print_trainable_parameters` counts them.
fn trained_share(params: &[Param]) -> String {
    let count = |trained: bool| -> usize {
        let params = params.iter().filter(|param| !trained || param.tensor.requires_grad());
        params.map(|param| param.tensor.numel()).sum()
    };
    let (trained, all) = (count(true), count(false));
    format!("{trained} of {all} ({:.4} %)", 100.0 * trained as f64 / all as f64)
}

/// How the models that a run only reads are put into memory; also applies the number of threads.
///
/// # Errors
/// If the run asks for what this version or this machine does not have.
fn model_options(run: &RunConfig) -> Result<ModelOptions> {
    use_threads(run.num_threads);
    let precision = match (run.bf16, run.fp16) {
        (true, _) => Precision::Bf16,
        (false, true) => Precision::F16,
        (false, false) => Precision::F32,
    };
    Ok(ModelOptions { device: run.device.resolve()?, dtype: run.dtype, precision })
}

/// [`micro_batch_tokens`] of a run that goes on from `saved`: as many as it began with, where only the memory can have changed
/// `tokens`. The cut decides how sums round.
fn kept_micro_batch_tokens(run: &RunConfig, device: tch::Device, tokens: usize, saved: &Saved) -> usize {
    let kept = saved.part("micro_batch").ok().filter(|_| run.max_tokens_per_micro_batch.is_none());
    let number = kept.and_then(|kept| kept["tokens"].as_u64()).map(|number| number as usize);
    number.filter(|&number| Some(&micro_batch_state(run, device, number)) == kept).unwrap_or(tokens)
}

/// The most tokens of a micro-batch, with what they depend on beside the memory.
fn micro_batch_state(run: &RunConfig, device: tch::Device, tokens: usize) -> Value {
    json!({
        "tokens": tokens,
        "device": format!("{device:?}"),
        "gradient_checkpointing": run.gradient_checkpointing,
        "set": run.max_tokens_per_micro_batch.is_some(),
    })
}

/// What a checkpoint keeps that no update changes: into how large micro-batches it is cut, what names of the hub stood for, and
/// digests of what the run reads.
fn fixed_state(
    run: &RunConfig,
    device: tch::Device,
    micro_batch_tokens: usize,
    commits: &Commits,
    inputs: &Inputs,
) -> Map<String, Value> {
    let micro_batch = micro_batch_state(run, device, micro_batch_tokens);
    Map::from_iter([
        ("micro_batch".into(), micro_batch),
        ("commits".into(), json!(commits)),
        ("inputs".into(), inputs.state()),
    ])
}

/// What to tell of the memory that a micro-batch of `tokens` tokens takes.
fn describe_micro_batch(run: &RunConfig, tokens: usize, activation_bytes: impl Fn(bool) -> usize) -> String {
    let mib = |checkpointing| (tokens * activation_bytes(checkpointing)).div_ceil(1 << 20);
    let without = match run.gradient_checkpointing {
        true => format!(" ({} MiB without gradient_checkpointing)", mib(false)),
        false => String::new(),
    };
    let taken = mib(run.gradient_checkpointing);
    format!("at most {tokens} tokens, whose activations take about {taken} MiB{without}")
}

/// What to tell of data that do not fill one update.
fn small_dataset(data: &DataConfig, rows: usize, batch_size: usize) -> Option<String> {
    (rows < batch_size).then(|| {
        format!(
            "{}: {rows} rows do not fill an update of {batch_size}: it goes on into the next shuffled pass, so rows repeat \
             within it",
            data.describe()
        )
    })
}

/// Checks that there are rows to evaluate on, where that is asked for on the way.
///
/// # Errors
/// If there are none.
fn check_held_out(eval: &EvalConfig, sources: &Sources<'_>, data: &DataConfig) -> Result<()> {
    let (Some(every), false) = (eval.eval_steps, sources.has_eval()) else { return Ok(()) };
    if data.dataset_train_split == data.dataset_test_split {
        return Err(crate::Error::Usage(format!(
            "eval_steps = {every}: expected rows that are held out, and dataset_train_split = dataset_test_split = {}; \
             eval_split_size keeps some of the training rows for it",
            data.dataset_test_split
        )));
    }
    Err(crate::Error::Usage(format!(
        "eval_steps = {every}: expected rows that are held out, and dataset_name = {} has no split `{}`; eval_split_size \
         keeps some of the training rows for it",
        data.describe(),
        data.dataset_test_split
    )))
}

/// What `read` makes of the rows of several datasets, one after another.
struct Gathered<T> {
    rows: Vec<T>,
    /// How many are each dataset's.
    lens: Vec<usize>,
    /// What to tell of them.
    warnings: Vec<String>,
}

fn gather<T, W: IntoIterator<Item = String>>(
    datasets: &[Dataset],
    read: impl Fn(&Dataset) -> Result<(Vec<T>, W)>,
) -> Result<Gathered<T>> {
    let mut all = Gathered { rows: Vec::new(), lens: Vec::new(), warnings: Vec::new() };
    for dataset in datasets {
        let (rows, warnings) = read(dataset)?;
        all.lens.push(rows.len());
        all.rows.extend(rows);
        all.warnings.extend(warnings);
    }
    Ok(all)
}

impl<T> Gathered<T> {
    /// A cursor at the beginning of a run over these rows.
    fn cursor(&self, seed: u64, data: &DataConfig) -> Cursor {
        Cursor::mixture(seed, &self.lens, &data.dataset_weights)
    }
}

/// What a model card says.
pub(crate) struct Card<'a> {
    /// The command that trained the model.
    pub(crate) command: &'static str,
    /// The model that it began as, or that it is an adapter of; a folder or a name of the hub.
    pub(crate) base_model: Option<&'a Path>,
    /// Whether it is an adapter, which PEFT opens.
    pub(crate) is_adapter: bool,
    /// What else is told of it.
    pub(crate) facts: &'a [(&'a str, String)],
}

impl Card<'_> {
    /// Writes the card of the model in `dir` beside it, with the command line that made it.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let title = dir.file_name().map_or("Model".into(), |name| name.to_string_lossy());
        write_text(&dir.join("README.md"), &self.text(&title, terminal::command_line().as_deref()))
    }

    fn text(&self, title: &str, command_line: Option<&str>) -> String {
        let mut card = String::from("---\n");
        if let Some(base) = self.base_model {
            // A JSON string is one of YAML.
            let _ = writeln!(card, "base_model: {}", Value::from(base.display().to_string()));
        }
        let library = if self.is_adapter { "peft" } else { "transformers" };
        let command = self.command;
        let _ = write!(card, "library_name: {library}\ntags:\n- rlhf\n- {command}\n---\n\n# {title}\n\n");
        let _ = write!(card, "Trained by `rlhf {command}` {}", env!("CARGO_PKG_VERSION"));
        match command_line {
            // Indented: a fence of backticks would end at one in the line.
            Some(line) => drop(write!(card, ":\n\n    {}\n\n", line.replace('\n', "\n    "))),
            None => card.push_str(".\n\n"),
        }
        card.push_str("| | |\n|---|---|\n");
        for (name, value) in self.facts {
            let _ = writeln!(card, "| {name} | {} |", value.replace('|', "\\|"));
        }
        card.push_str("\n`config.yaml` holds every setting of the run, `metrics.jsonl` its course.\n");
        card
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::SftConfig;

    #[test]
    fn a_run_that_goes_on_and_ends_at_once_has_the_state_that_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let config = SftConfig::new("model", "data", dir.path());
        let commits = Commits::from([("a/b@main".into(), "7".into())]);
        let inputs = Inputs::default();
        let plan = TrainPlan { batch_size: 4, num_updates: 9 };
        let fixed = || fixed_state(&config.run, tch::Device::Cpu, 300, &commits, &inputs);
        let optimizer = || AdamW::new(Vec::new(), &config.optimizer);
        let begun = || Progress::<f64>::new(optimizer(), Cursor::new(1, 9), &config.eval, &config.run, fixed());
        let mut progress = begun();
        progress.cursor.take(4);
        progress.since = 2.5;
        progress.advance(false);
        let save = |progress: &Progress<f64>| {
            let mut checkpoints = Checkpoints::new("sft", &config.run, &config, 9, 0).unwrap();
            let write = |dir: &Path| progress.optimizer.save(&dir.join(OPTIMIZER));
            checkpoints.save(progress.done, Map::new(), progress.whole.clone(), write).unwrap();
            Saved::read(&checkpoints.place(progress.done)).unwrap()
        };
        let mut again = begun();
        again.load(&save(&progress), &config.run, true, &inputs, &plan).unwrap();
        assert_eq!((again.done, &again.whole), (1, &progress.whole));
        let saved = save(&again);
        begun().load(&saved, &config.run, true, &inputs, &plan).unwrap();
        // On a machine with other memory it keeps the size of its micro-batches, but not where that is set, or depends on more.
        let kept = |run: &RunConfig, device| kept_micro_batch_tokens(run, device, 400, &saved);
        let mut run = config.run.clone();
        assert_eq!((kept(&run, tch::Device::Cpu), kept(&run, tch::Device::Cuda(0))), (300, 400));
        run.gradient_checkpointing ^= true;
        assert_eq!(kept(&run, tch::Device::Cpu), 400);
        run = RunConfig { max_tokens_per_micro_batch: Some(400), ..config.run.clone() };
        assert_eq!(kept(&run, tch::Device::Cpu), 400);
    }

    #[test]
    fn the_command_that_tries_a_model_asks_as_its_data_does() {
        let command = |row: Value, most| command_to_try(Path::new("my runs/ppo"), Some(&row), most)[1..].join(" ");
        let words = "generate --model_name_or_path my runs/ppo";
        assert_eq!(command(json!({"prompt": "The movie"}), None), format!("{words} The movie"));
        assert_eq!(command(json!({"query": "-5 is"}), Some(8)), format!("{words} --max_new_tokens 8 -- -5 is"));
        let system = json!({"role": "system", "content": "Be brief."});
        let chat = json!([system, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]);
        for name in ["prompt", "messages"] {
            assert_eq!(command(json!({name: chat.clone()}), None), format!("{words} --apply_chat_template Who?"));
        }
        assert_eq!(command(json!({"text": "One two  three four five"}), None), format!("{words} One two three four"));
        // What cannot be shown in a line is asked for.
        for row in [json!({"prompt": "a\nb"}), json!({"prompt": "x".repeat(300)}), json!({"prompt_ids": [1]})] {
            assert_eq!(command(row, None), words);
        }
    }

    #[test]
    fn a_model_card_names_its_base_its_library_and_the_command_line() {
        let facts = [("updates", "3".to_string())];
        let base = Path::new("org/base: \"7b\"");
        let card = Card { command: "sft", base_model: Some(base), is_adapter: true, facts: &facts };
        let text = card.text("mine", Some("rlhf sft --output_dir 'a b'"));
        let (front, body) = text.strip_prefix("---\n").unwrap().split_once("---\n").unwrap();
        let front: Value = serde_saphyr::from_str(front).unwrap();
        assert_eq!(front, json!({"base_model": base, "library_name": "peft", "tags": ["rlhf", "sft"]}));
        assert!(body.contains("`rlhf sft` ") && body.contains(":\n\n    rlhf sft --output_dir 'a b'\n\n"), "{body}");
        let text = Card { base_model: None, is_adapter: false, ..card }.text("mine", None);
        assert!(text.starts_with("---\nlibrary_name: transformers\n") && text.contains("| updates | 3 |"), "{text}");
    }
}
