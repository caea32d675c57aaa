//! `rlhf eval`: responses of a model to held-out prompts, scored by rewards, or compared with those of another model by a judge.
//!
//! | subject | file |
//! |---|---|
//! | responses of models and of columns | `responses` |
//! | scores of rewards | `scores` |
//! | judges of pairs: programs, OpenAI-compatible endpoints | `judge` |
//! | the folder and its rows, from which an evaluation that was cut continues | `results` |
//! | intervals, length control, pass@k | `statistics` |
//! | the summary | `summary` |
//!
//! Rows are appended as they are judged, so that an evaluation that is cut loses at most the batch at hand.

mod judge;
mod responses;
mod results;
mod scores;
pub mod statistics;
mod summary;

pub use results::{ResultRow, Verdict};
pub use summary::{Comparison, ScoreSummary, SideSummary, Summary};

use crate::data::{Dataset, Prompt};
use crate::environment::{Environment, Log, environment_rewards};
use crate::reward::{Rewards, Spec, Warn, check_columns, resolve};
use crate::run::Console;
use crate::run::inputs::{ENVIRONMENTS, Inputs};
use crate::run::output_dir::TOOLS_LOG;
use crate::run::sinks::phase_bar::PhaseBar;
use crate::settings::EvaluateConfig;
use judge::{NoVerdict, Outcome, Pair, PairJudge, Preference};
use responses::{generate_missing, plain_prompt, reference, sampled, sampling_warning};
use results::{Store, row_digest};
use rlhf_base::safe_text::one_line;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_lm::tokenizer::{FixedDate, Tokenizer};
use scores::Scorer;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use summary::About;

/// Number of failures of the judge in a row that end an evaluation.
const MOST_FAILURES: usize = 5;

/// Number of rows without a verdict at the start that end an evaluation.
const MOST_UNDECIDED: usize = 10;

/// Share of rows without a verdict above which an evaluation ends with a warning, if they are more than two.
const MOST_WITHOUT_VERDICT: f64 = 0.1;

/// One of the two sides of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    /// The model that is evaluated.
    A,
    /// The model, or the column, that it is compared with.
    B,
}

/// Evaluates a model, alone or against another one, and writes `responses.jsonl`, `results.jsonl` and `summary.json` to
/// `output_dir`. An evaluation that was cut continues there: responses that are written are not generated again, and rows that have
/// a verdict are not judged again.
///
/// ```no_run
/// use rlhf::run::Console;
/// use rlhf::settings::EvaluateConfig;
///
/// fn main() -> rlhf::Result<()> {
///     let mut config = EvaluateConfig::new("runs/ppo", "data/test.jsonl", "runs/eval");
///     config.compare = Some("runs/sft".into());
///     config.reward_model_path = Some("runs/reward".into());
///     let summary = rlhf::eval::evaluate(&config, Console::Silent)?;
///     println!("win rate {:?}", summary.comparison.map(|comparison| comparison.win_rate));
///     Ok(())
/// }
/// ```
///
/// # Errors
/// If a setting, a model, a row or the folder is invalid; if the judge fails several times in a row, or gives no verdict at all. Everything
/// that is written stays.
pub fn evaluate(config: &EvaluateConfig, console: Console) -> Result<Summary> {
    let rewards = config.checked()?;
    let pairs = PairJudge::new(&config.judge)?;
    let specs = resolve(&rewards)?;
    let models = Models::find(config)?;
    // An evaluation that continues on another day has the same prompts.
    let date = results::chat_template_date(config)?;
    let _date = FixedDate::new(&date)?;
    let mut task = Task::read(config, &models, &specs)?;
    let sampled = sampled(config, &models)?;
    let mut store = Store::open(config, &models.inputs(config, &specs, pairs.as_ref())?, &sampled, &task.rows)?;
    if let [_, ..] = store.judge_changes() {
        console.warn(&format!(
            "{}: inputs of the judge have changed: {}; earlier verdicts are kept, and the summary counts them (all are judged again with \
             overwrite_output_dir = true)",
            config.output_dir.display(),
            store.judge_changes().join("; ")
        ));
    }
    store.write_settings(config)?;
    // The log is opened now, because its folder exists only now.
    task.log = Log::at(&config.output_dir.join(TOOLS_LOG));
    task.environment = config.environment.environment(&task.log)?;
    task.environment.iter().try_for_each(|environment| environment.start())?;
    if pairs.is_none() && specs.is_empty() && task.environment_rewards(config).is_empty() {
        return Err(Error::refused(
            "environment_factory",
            ": expected a reward, as the environment gives none: set reward_model_path, reward, reward_command or \
             reward_url",
        ));
    }
    let progress = PhaseBar::new(console);
    sampling_warning(&sampled).iter().for_each(|warning| progress.warn(warning));
    for (side, dir) in [(Side::A, Some(&models.a)), (Side::B, models.b.as_ref())] {
        if let Some(dir) = dir {
            generate_missing(config, side, dir, &task, &mut store, &progress)?;
        }
    }
    let mut judge = task.judge(config, &models, pairs, specs)?;
    let (bar, console) = progress.parts();
    judge.warn_by(Arc::new(move |message: &str| bar.suspend(|| console.warn(message))));
    judge.print_by(&progress);
    let described = judge.describe();
    judge.judge_missing(&task, &mut store, &progress)?;
    progress.finish();
    let rows = store.rows(task.prompts.len());
    let prompts = rows.len() / task.samples;
    let about = About {
        judge: described,
        names: [Some(config.model_name_or_path.display().to_string()), task.compared.clone()],
        is_column: task.references.is_some(),
        prompts,
        left_out: task.wanted - prompts,
        samples: config.sampling.num_return_sequences,
        pass_score: config.pass_score,
        seed: config.seed,
    };
    let judged = rows.iter().filter(|row| row.was_judged()).count();
    let Some(summary) = Summary::new(about, &rows) else {
        let first = rows.iter().find_map(|row| row.no_verdict.as_deref()).unwrap_or("no score");
        return Err(Error::Run(format!("the judge gave no verdict for any of {judged} rows; the first: {first}")));
    };
    store.finish(&summary)?;
    let without = summary.no_verdict;
    if without > 2 && without as f64 > MOST_WITHOUT_VERDICT * judged as f64 {
        console.warn(&format!(
            "{without} of {judged} rows have no verdict and are left out of the summary: results.jsonl has the reasons"
        ));
    }
    Ok(summary)
}

/// The folders of the models.
struct Models {
    a: PathBuf,
    b: Option<PathBuf>,
}

impl Models {
    fn find(config: &EvaluateConfig) -> Result<Self> {
        let find = |name: &PathBuf, revision: &String| hub::model_dir(name, Some(revision));
        Ok(Self {
            a: find(&config.model_name_or_path, &config.model_revision)?,
            b: config.compare.as_ref().map(|name| find(name, &config.compare_revision)).transpose()?,
        })
    }

    /// Returns the digests of the models and of everything that decides verdicts, to detect changes. The rows of the dataset are compared
    /// one by one.
    fn inputs(&self, config: &EvaluateConfig, specs: &[Spec], judge: Option<&PairJudge>) -> Result<Inputs> {
        let mut inputs = Inputs::default();
        inputs.date();
        inputs.model("model_name_or_path", &self.a)?;
        if let Some(dir) = &self.b {
            inputs.model("compare", dir)?;
        }
        for (name, dir) in specs.iter().filter_map(Spec::named_model) {
            inputs.model(&format!("reward {name}"), dir)?;
        }
        if let Some(path) = &config.judge.judge_template {
            inputs.file("judge_template", path)?;
        }
        specs.iter().for_each(|spec| inputs.reward(spec.name(), &spec.contents()));
        inputs.programs(ENVIRONMENTS, &config.environment.contents());
        judge.iter().for_each(|judge| inputs.reward("judge_command", judge.files()));
        Ok(inputs)
    }
}

/// The prompts of an evaluation.
struct Task {
    dataset: Dataset,
    /// The prompts for the tokenizer of the model that is evaluated.
    prompts: Vec<Prompt>,
    /// The prompts as a reader sees them.
    texts: Vec<String>,
    /// Digests of the rows.
    rows: Vec<String>,
    /// The responses of the column to compare with, if there is one.
    references: Option<Vec<String>>,
    /// The model or the column to compare with.
    compared: Option<String>,
    /// Number of responses of a model to each prompt.
    samples: usize,
    /// Number of prompts to evaluate, those beyond `max_judgements` included.
    wanted: usize,
    /// Maximum number of times that a prompt is judged, over all prompts and runs.
    most: Option<usize>,
    tokenizer: Tokenizer,
    /// Tools and environments, if there are any.
    environment: Option<Arc<dyn Environment>>,
    /// Log of the output that they print.
    log: Log,
}

impl Task {
    /// Reads the rows and checks them.
    fn read(config: &EvaluateConfig, models: &Models, specs: &[Spec]) -> Result<Self> {
        let columns = config.split.columns()?;
        let mut dataset = Dataset::from_files(&config.split.find(&config.dataset_name)?)?.with_columns(&columns)?;
        dataset = if config.apply_chat_template || config.environment.is_used() {
            dataset.with_chat_prompts()
        } else {
            dataset
        };
        let wanted = dataset.rows().count().min(config.num_prompts.unwrap_or(usize::MAX));
        let most = config.max_judgements.map(|most| most / config.judgements_per_prompt());
        let dataset = dataset.first(wanted.min(most.unwrap_or(usize::MAX)));
        dataset.check(|row| {
            config.compare_column.iter().try_for_each(|column| reference(row, column).map(drop))?;
            specs.iter().try_for_each(|spec| spec.check_row(row))
        })?;
        let optional: Vec<_> = specs.iter().filter_map(Spec::optional_column).collect();
        check_columns(&optional, dataset.rows())?;
        let mut tokenizer = Tokenizer::from_pretrained(&models.a)?;
        tokenizer.set_chat_variables(config.split.chat_template.variables());
        // Their lengths are checked against the context of each model.
        let prompts = dataset.prompts(&tokenizer, i64::MAX, usize::MAX)?;
        let column_responses = |column: &String| {
            dataset.rows().map(|row| reference(row, column).map(Cow::into_owned)).collect::<Result<Vec<_>>>()
        };
        let column = config.compare_column.as_ref();
        Ok(Self {
            rows: dataset.rows().map(row_digest).collect(),
            texts: dataset.rows().zip(&prompts).map(|(row, prompt)| plain_prompt(row, prompt)).collect(),
            references: column.map(column_responses).transpose()?,
            compared: match &config.compare {
                Some(model) => Some(model.display().to_string()),
                None => column.map(|column| format!("column {column}")),
            },
            samples: config.sampling.num_return_sequences,
            wanted,
            most,
            prompts,
            dataset,
            tokenizer,
            environment: None,
            log: Log::default(),
        })
    }

    /// Returns the rewards of the environment. There are none if responses are compared with a column, which has no episodes.
    fn environment_rewards(&self, config: &EvaluateConfig) -> Rewards {
        match &self.environment {
            Some(environment) if config.compare_column.is_none() => {
                environment_rewards(&**environment, &config.environment)
            }
            _ => Rewards::new(),
        }
    }

    /// Returns the judge: `pairs`, or else the rewards of `specs`, which are loaded.
    fn judge(
        &self,
        config: &EvaluateConfig,
        models: &Models,
        pairs: Option<PairJudge>,
        specs: Vec<Spec>,
    ) -> Result<Judge> {
        if let Some(pairs) = pairs {
            return Ok(Judge::Pairs(pairs));
        }
        let options = config.compute.options()?;
        let mut rewards = Rewards::load(specs, &config.rewards, None, &self.tokenizer, config.batch_size, options)?;
        rewards.extend(self.environment_rewards(config));
        let other = models.b.as_ref().map(|dir| self.tokenizer.beside(dir)).transpose()?;
        // A model with other token ids is scored by its text.
        let other_ids = other.is_none_or(|other| {
            self.tokenizer.difference(&other) > 0 || other.has_other_chat_template(&self.tokenizer)
        });
        let per_prompt = config.judgements_per_prompt();
        Ok(Judge::Scores(Scorer { rewards, other_ids, at_once: (config.batch_size / per_prompt).max(1) }))
    }

    /// Returns the texts to compare the responses to a prompt with: one for each response, or one for all.
    fn compared_texts<'a>(&'a self, store: &'a Store, index: usize) -> Vec<&'a str> {
        match &self.references {
            Some(texts) => vec![texts[index].as_str()],
            None => store.responses(Side::B, index).iter().map(|response| response.text.as_str()).collect(),
        }
    }

    /// Returns the rows of a prompt, before they are judged.
    fn unjudged(&self, store: &Store, index: usize) -> Vec<ResultRow> {
        let compared = self.compared_texts(store, index);
        let row = |(sample, response): (usize, &results::ResponseRecord)| {
            let other = compared.get(sample).or(compared.first());
            ResultRow {
                index,
                sample,
                prompt: response.episode.as_ref().map_or_else(
                    || self.texts[index].clone(),
                    |episode| plain_prompt(&episode.prompt.row, &episode.prompt),
                ),
                response_a: response.text.clone(),
                response_b: other.map(|text| (*text).to_string()),
                length_a: response.text.chars().count(),
                length_b: other.map(|text| text.chars().count()),
                ..ResultRow::default()
            }
        };
        store.responses(Side::A, index).iter().enumerate().map(row).collect()
    }
}

/// The judge of an evaluation.
enum Judge {
    Pairs(PairJudge),
    Scores(Scorer),
}

impl Judge {
    /// Sets the function that receives a warning of the first retry.
    fn warn_by(&mut self, warn: Warn) {
        match self {
            Self::Pairs(pairs) => pairs.warn_by(warn),
            Self::Scores(scorer) => scorer.rewards.warn_by(&warn),
        }
    }

    /// Shows the output that Python functions print.
    fn print_by(&mut self, progress: &PhaseBar) {
        if let Self::Scores(scorer) = self {
            let (bar, console) = progress.parts();
            let print: Warn = Arc::new(move |line: &str| bar.suspend(|| console.announce_printed(line)));
            scorer.rewards.print_by(&print);
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Pairs(pairs) => pairs.describe(),
            Self::Scores(scorer) => scorer.rewards.describe(),
        }
    }

    /// Judges the prompts that the store has no verdict for, as far as `max_judgements` allows, and stores their rows.
    ///
    /// # Errors
    /// If the judge fails again and again; if it gives one verdict or score too many. The others may then be of other rows, and are not kept.
    fn judge_missing(mut self, task: &Task, store: &mut Store, progress: &PhaseBar) -> Result<()> {
        let missing = store.to_judge(task.prompts.len(), task.most);
        if missing.is_empty() {
            return Ok(());
        }
        progress.start("verdicts", missing.len());
        let judged = self.judge_all(&missing, task, store, progress);
        match self.finish() {
            Err(error) if self.may_shift() => {
                store.forget(&missing)?;
                let hint = "the verdicts of this evaluation since its last start are taken back";
                Err(Error::Run(format!("{error}; {hint}")))
            }
            finished => judged.and(finished),
        }
    }

    /// Judges the prompts with these indices, and stores their rows, until the judge fails again and again.
    fn judge_all(&mut self, missing: &[usize], task: &Task, store: &mut Store, progress: &PhaseBar) -> Result<()> {
        let at_once = match self {
            // Both orders of each pair are requested at the same time.
            Self::Pairs(pairs) => pairs.at_once().div_ceil(2 * task.samples).max(1),
            Self::Scores(scorer) => scorer.at_once,
        };
        let mut failures = Failures::new(store.has_verdicts());
        for indices in missing.chunks(at_once) {
            let mut rows: Vec<ResultRow> = indices.iter().flat_map(|&index| task.unjudged(store, index)).collect();
            match self {
                Self::Pairs(pairs) => judge_pairs(pairs, task, &mut rows),
                Self::Scores(scorer) => scorer.score(task, store, indices, &mut rows)?,
            }
            if matches!(self, Self::Pairs(pairs) if pairs.is_misplaced()) {
                return Ok(());
            }
            failures.add(&rows, progress);
            for rows in rows.chunk_by(|a, b| a.index == b.index) {
                store.add_rows(rows[0].index, rows.to_vec())?;
            }
            failures.check()?;
            progress.advance(indices.len());
        }
        Ok(())
    }

    /// Ends programs, after their last rows or after a failure.
    ///
    /// # Errors
    /// If a program has written a line too many.
    fn finish(&mut self) -> Result<()> {
        match self {
            Self::Pairs(pairs) => pairs.finish(),
            Self::Scores(scorer) => scorer.rewards.finish(),
        }
    }

    /// Whether a line too many may have shifted the verdicts before it.
    fn may_shift(&self) -> bool {
        match self {
            Self::Pairs(pairs) => pairs.may_shift(),
            Self::Scores(_) => true,
        }
    }
}

/// Judges the pairs of rows in both orders. Equal responses are a tie without a call.
fn judge_pairs(judge: &mut PairJudge, task: &Task, rows: &mut [ResultRow]) {
    let data: Vec<&Value> = task.dataset.rows().collect();
    let differs = |row: &&ResultRow| row.response_b.as_ref() != Some(&row.response_a);
    let pairs = rows.iter().filter(differs).flat_map(|row| {
        let a = row.response_a.as_str();
        let b = row.response_b.as_deref().unwrap_or_default();
        let pair = |first, second| Pair { prompt: &row.prompt, first, second, row: data[row.index] };
        [pair(a, b), pair(b, a)]
    });
    let outcomes = judge.judge(&pairs.collect::<Vec<_>>());
    let mut outcomes = outcomes.chunks_exact(2);
    for row in rows {
        if row.response_b.as_ref() == Some(&row.response_a) {
            row.winner = Some(Verdict::Tie);
        } else if let Some([first, second]) = outcomes.next() {
            decide(row, first, second);
        }
    }
}

/// Sets the winner of a row from the outcomes of both orders: a winner that depends on the order is a tie.
fn decide(row: &mut ResultRow, first: &Outcome, second: &Outcome) {
    let verdict = |outcome: &Outcome, first_winner, second_winner| match outcome {
        Ok(Preference::First) => Some(first_winner),
        Ok(Preference::Second) => Some(second_winner),
        Ok(Preference::Tie) => Some(Verdict::Tie),
        Err(_) => None,
    };
    let verdicts = [verdict(first, Verdict::A, Verdict::B), verdict(second, Verdict::B, Verdict::A)];
    row.verdicts = Some(verdicts);
    match verdicts {
        [Some(one), Some(other)] if one == other => row.winner = Some(one),
        [Some(_), Some(_)] => {
            row.winner = Some(Verdict::Tie);
            row.inconsistent = true;
        }
        _ => {
            let failed = [first, second].into_iter().find_map(|outcome| outcome.as_ref().err());
            failed.into_iter().for_each(|no_verdict| row.set_no_verdict(no_verdict.clone()));
        }
    }
}

impl ResultRow {
    fn set_no_verdict(&mut self, NoVerdict { reason, failed }: NoVerdict) {
        // The reason may hold anything that a judge replies.
        self.no_verdict = Some(one_line(&reason).into_owned());
        self.failed = failed;
    }
}

/// Counts rows without a verdict. The first is reported. A judge that fails again and again, or gives no verdict at all, ends the
/// evaluation.
struct Failures {
    warned: bool,
    in_a_row: usize,
    /// Rows without a verdict, as long as no row has one.
    at_first: Option<usize>,
    last: String,
}

impl Failures {
    /// `has_verdicts` tells whether an earlier run of the evaluation has verdicts.
    fn new(has_verdicts: bool) -> Self {
        Self { warned: false, in_a_row: 0, at_first: (!has_verdicts).then_some(0), last: String::new() }
    }

    fn add(&mut self, rows: &[ResultRow], progress: &PhaseBar) {
        for row in rows.iter().filter(|row| row.was_judged()) {
            self.in_a_row = if row.failed { self.in_a_row + 1 } else { 0 };
            self.at_first = self.at_first.filter(|_| !row.is_decided()).map(|count| count + 1);
            let Some(reason) = &row.no_verdict else { continue };
            self.last.clone_from(reason);
            if !std::mem::replace(&mut self.warned, true) {
                progress.warn(&format!(
                    "no verdict for prompt {} of the dataset: {reason} (reported once; results.jsonl has all)",
                    row.index + 1
                ));
            }
        }
    }

    /// # Errors
    /// If the last [`MOST_FAILURES`] rows have no verdict because the judge failed, or the first [`MOST_UNDECIDED`] have none.
    fn check(&self) -> Result<()> {
        let failed = self.in_a_row >= MOST_FAILURES;
        if !failed && self.at_first.is_none_or(|count| count < MOST_UNDECIDED) {
            return Ok(());
        }
        let failure = if failed {
            format!("failed for {} rows in a row", self.in_a_row)
        } else {
            format!("gave no verdict for the first {} rows", self.at_first.unwrap_or_default())
        };
        Err(Error::Run(format!("the judge {failure}: {}; the same command continues the evaluation", self.last)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_judge_sees_the_text_of_messages_whose_content_is_a_list_of_parts() {
        let parts = |texts: &[&str]| -> Vec<Value> {
            texts.iter().map(|text| serde_json::json!({"type": "text", "text": text})).collect()
        };
        let message = |role: &str, texts: &[&str]| serde_json::json!({"role": role, "content": parts(texts)});
        let prompt = |messages: &[Value]| {
            let row = serde_json::json!({"prompt": messages});
            plain_prompt(&row, &Prompt { tokens: vec![1], text: "rendered".into(), row: row.clone() })
        };
        let (system, user) = (message("system", &["Be brief."]), message("user", &["Why is ", "the sky blue?"]));
        assert_eq!(prompt(std::slice::from_ref(&user)), "Why is the sky blue?");
        assert_eq!(prompt(&[system, user.clone()]), "system: Be brief.\n\nuser: Why is the sky blue?");
        let answer = serde_json::json!({"answer": [user]});
        assert_eq!(reference(&answer, "answer").unwrap(), "Why is the sky blue?");
    }

    #[test]
    fn a_winner_that_depends_on_the_order_is_a_tie() {
        let nonsense = || Err(NoVerdict { reason: "hm\u{1b}[2J".into(), failed: false });
        for (first, second, winner, inconsistent) in [
            (Ok(Preference::First), Ok(Preference::Second), Some(Verdict::A), false),
            (Ok(Preference::Second), Ok(Preference::First), Some(Verdict::B), false),
            (Ok(Preference::Tie), Ok(Preference::Tie), Some(Verdict::Tie), false),
            (Ok(Preference::First), Ok(Preference::First), Some(Verdict::Tie), true),
            (Ok(Preference::First), Ok(Preference::Tie), Some(Verdict::Tie), true),
            (Ok(Preference::First), nonsense(), None, false),
            (nonsense(), nonsense(), None, false),
        ] {
            let mut row = ResultRow::default();
            decide(&mut row, &first, &second);
            assert_eq!((row.winner, row.inconsistent), (winner, inconsistent), "{first:?} {second:?}");
            assert_eq!(row.no_verdict.is_some(), winner.is_none());
            assert!(!row.no_verdict.unwrap_or_default().contains('\u{1b}'));
        }
    }

    #[test]
    fn a_judge_that_fails_in_a_row_or_never_decides_ends_the_evaluation() {
        let row = |failed| ResultRow { failed, no_verdict: Some("timed out".into()), ..ResultRow::default() };
        let tie = || ResultRow { winner: Some(Verdict::Tie), response_b: Some(String::new()), ..ResultRow::default() };
        let progress = PhaseBar::new(Console::Silent);
        let check = |has_verdicts, rows: &[&[ResultRow]]| {
            let mut failures = Failures::new(has_verdicts);
            rows.iter().for_each(|rows| failures.add(rows, &progress));
            failures.check().map_err(|error| error.to_string())
        };
        let (fail, none) = (vec![row(true); 4], vec![row(false); 9]);
        assert_eq!(check(false, &[&fail, &[row(false)], &fail]), Ok(()));
        // Equal responses are not judged.
        let error = check(false, &[&fail, &[tie()], &[row(true)]]).unwrap_err();
        assert!(error.starts_with("the judge failed for 5 rows in a row: timed out"), "{error}");
        assert_eq!(check(false, &[&none]), Ok(()));
        let error = check(false, &[&none, &[tie()], &[row(false)]]).unwrap_err();
        assert!(error.starts_with("the judge gave no verdict for the first 10 rows: timed out"), "{error}");
        let decided = ResultRow { verdicts: Some([Some(Verdict::Tie); 2]), ..tie() };
        assert_eq!(check(false, &[&[decided], &none, &none]), Ok(()));
        assert_eq!(check(true, &[&none, &none]), Ok(()));
    }
}
