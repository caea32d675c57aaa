//! The page of a report.

use super::MARK;
use super::charts::Charts;
use super::cut::Cut;
use super::html::{Html, number};
use super::progress::Progress;
use super::read::{Run, Setting, settings_of};
use super::responses::{is_shaded, response, text};
use super::samples::{Frame, Highlights, Prompt};
use super::svg::{COLOURS, Chart};
use super::verdict::{Mark, verdict};
use crate::run::ends::{MOST_VALUES, words};
use crate::run::group_names::written;
use crate::settings::{DistillConfig, DpoConfig, PpoConfig, Preset, RewardConfig, SftConfig};
use crate::terminal::{about, date};
use rlhf_base::Result;
use rlhf_base::safe_text::one_line;
use rlhf_base::schema::Choices;
use std::time::Duration;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Script of the live page, after [`SCRIPT`].
const LIVE_SCRIPT: &str = include_str!("live.js");

/// Points of all curves together, about: three per column of a chart and curve.
const MOST_POINTS: usize = 60_000;

/// Columns of a chart: at most what its width on a screen can show, and at least what shows a shape if there are very many curves.
const COLUMNS: std::ops::RangeInclusive<usize> = 40..=200;

/// Bytes of the samples together, about.
const MOST_SAMPLE_BYTES: usize = 800_000;

/// Alarms of a run, at most: the first ones.
const MOST_ALARMS: usize = 100;

/// Prompts in each list of prompts to look at first.
const HIGHLIGHTS: usize = 8;

/// Bytes of all parts of a page together, at most.
const MOST_PAGE: usize = 1_900_000;

/// Returns the page of these runs, at least one.
pub fn page(runs: &[Run]) -> String {
    let mut page = Html::default();
    // The page needs no network. With this policy a browser refuses any request.
    head(
        &mut page,
        &title_of(runs),
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:",
    );
    for (_, part) in parts(runs) {
        page.append(&part);
    }
    foot(&mut page, "");
    page.finish()
}

/// A part of a page: the id of its element, and the element. It can be replaced by itself.
pub type Part = (&'static str, Html);

/// Writes a section about these runs.
type WriteSection = fn(&mut Html, &[Run]);

/// Returns the parts of the page of these runs, in their order.
pub fn parts(runs: &[Run]) -> Vec<Part> {
    let sections: [(&str, WriteSection); 6] = [
        ("verdict", verdicts),
        ("differences", differences),
        ("curves", curves),
        ("samples", samples),
        ("configuration", configuration),
        ("checks", checks),
    ];
    let part = |(id, write): (&'static str, WriteSection)| {
        let mut part = Html::default();
        write(&mut part, runs);
        (id, part)
    };
    let mut parts: Vec<Part> = sections.into_iter().map(part).filter(|(_, part)| part.len() > 0).collect();
    leave_out(&mut parts, MOST_PAGE);
    parts
}

/// Replaces the largest parts by a note until all together have at most `most` bytes: a folder may have more than a run writes.
fn leave_out(parts: &mut [Part], most: usize) {
    while parts.iter().map(|(_, part)| part.len()).sum::<usize>() > most {
        let Some((id, part)) = parts.iter_mut().max_by_key(|(_, part)| part.len()) else { return };
        let bytes = part.len();
        let mut note = Html::default();
        note.raw("<section id=\"").raw(id).raw("\">\n<p class=\"note\">This part is left out: it has ").text(bytes);
        note.raw(" bytes. The files in the folder of the run have its contents.</p>\n</section>\n");
        if note.len() >= bytes {
            return;
        }
        *part = note;
    }
}

/// Returns the page of a run whose script asks the server for parts that changed after `revision`.
pub fn live_page<'a>(title: &str, revision: &str, parts: impl Iterator<Item = &'a Html>) -> String {
    let mut page = Html::default();
    head(
        &mut page,
        title,
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
    );
    page.raw("<p class=\"note\" id=\"live\" role=\"status\" data-revision=\"").text(revision).raw("\"></p>\n");
    page.raw("<noscript><p class=\"note\">Without scripts this page does not change: reload it for newer updates.</p></noscript>\n");
    for part in parts {
        page.append(part);
    }
    foot(&mut page, LIVE_SCRIPT);
    page.finish()
}

/// Returns the line with the progress of a run, a part of the live page, or with the error of reading it.
pub fn progress_line(progress: &Result<Progress>) -> Part {
    let mut part = Html::default();
    part.raw("<p class=\"note\" id=\"progress\" data-short=\"");
    part.text(progress.as_ref().ok().and_then(Progress::short).unwrap_or_default()).raw("\">");
    match progress {
        Ok(progress) => part.text(progress),
        Err(error) => part.text("This is the last state that could be read: ").text(error),
    };
    part.raw("</p>\n");
    ("progress", part)
}

/// Writes everything before the parts; `policy` tells what a browser may load.
fn head(page: &mut Html, title: &str, policy: &'static str) {
    page.raw(MARK).raw("\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page.raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    page.raw("<meta http-equiv=\"Content-Security-Policy\" content=\"").raw(policy).raw("\">\n");
    page.raw("<link rel=\"icon\" href=\"data:,\">\n<title>").text(title).raw("</title>\n<style>\n").raw(STYLE);
    page.raw("</style>\n</head>\n<body>\n<main>\n<header>\n<h1>").text(title).raw("</h1>\n<nav>");
    page.raw("<a href=\"#verdict\">Verdict</a> <a href=\"#curves\">Curves</a> <a href=\"#samples\">Samples</a> ");
    page.raw(
        "<a href=\"#configuration\">Configuration</a> <a href=\"#checks\">Alarms and checks</a></nav>\n</header>\n",
    );
}

/// Writes everything after the parts; `script` comes after that of all pages.
fn foot(page: &mut Html, script: &'static str) {
    page.raw("<footer>Made by rlhf ").text(env!("CARGO_PKG_VERSION"));
    page.raw(" from what the run has written. This page loads nothing from elsewhere.</footer>\n</main>\n<div id=\"tip\" hidden></div>\n");
    page.raw("<script>\n").raw(SCRIPT).raw(script).raw("</script>\n</body>\n</html>\n");
}

/// Writes the key of a run: its label, and its colour if there are several runs.
fn key(page: &mut Html, runs: &[Run], at: usize) {
    page.raw("<span class=\"key k").text(at % COLOURS).raw("\">");
    page.raw(if runs.len() > 1 { "<i></i>" } else { "" }).text(&runs[at].label).raw("</span>");
}

/// Writes the heading of a run's part of a section, where there are several runs.
fn heading(page: &mut Html, runs: &[Run], at: usize) {
    if runs.len() > 1 {
        page.raw("<h3>");
        key(page, runs, at);
        page.raw("</h3>\n");
    }
}

/// The settings in the summary of a run, each with its name there. Where several settings are listed, the first that is set is shown.
const SUMMARY: [(&str, &[&str]); 4] = [
    ("model", &["model_name_or_path", "sft_model_path"]),
    ("data", &["dataset_name"]),
    ("rewards", &["reward", "reward_model_path", "reward_command", "reward_url"]),
    ("folder", &["output_dir"]),
];

/// Returns the title of the page of these runs: their labels and, for a single run, its command.
pub fn title_of(runs: &[Run]) -> String {
    let labels: Vec<&str> = runs.iter().map(|run| run.label.as_str()).collect();
    let command = runs.first().filter(|_| runs.len() == 1).and_then(command_of);
    command.map_or(labels.join(", "), |command| format!("{}: {command}", labels.join(", ")))
}

/// Returns the command of a run, from its model card or from a setting that only this command has.
fn command_of(run: &Run) -> Option<String> {
    let words: Vec<&str> = run.command_line.as_deref().unwrap_or_default().split_whitespace().take(2).collect();
    let card_command = (words.len() == 2 && words[0] == "rlhf").then(|| words.join(" "));
    card_command.or_else(|| Some(format!("rlhf {}", kind(run)?.command())))
}

/// Returns the seconds of a run's updates and evaluations. A line of metrics has the seconds of one update, and stands for all updates
/// since the line before it.
fn seconds(run: &Run) -> Option<f64> {
    let mut done = 0.0;
    let updates: f64 = run
        .points("time/update")?
        .iter()
        .map(|&(step, seconds)| seconds * (step - std::mem::replace(&mut done, step)))
        .filter(|seconds| seconds.is_finite())
        .sum();
    let evaluations = run.points("time/eval").unwrap_or_default().iter().map(|point| point.1);
    let all = updates + evaluations.filter(|seconds| seconds.is_finite()).sum::<f64>();
    (all > 0.0 && all < MOST_SECONDS).then_some(all)
}

/// Seconds up to which a duration is shown: a thousand years.
const MOST_SECONDS: f64 = 3.2e10;

/// Writes what a run is about: its command, its model, its data, when it began and how long it took, as far as they are known.
fn summary(page: &mut Html, run: &Run) {
    let is_set = |value: &&str| !matches!(*value, "" | "null" | "none" | "[]");
    let mut facts: Vec<(&str, String)> = Vec::new();
    let line = run.command_line.as_deref().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    facts.extend(line.or_else(|| command_of(run)).map(|command| ("command", command)));
    for (name, settings) in SUMMARY {
        let value = settings.iter().find_map(|setting| run.public_setting(setting).filter(is_set));
        facts.extend(value.map(|value| (name, value.trim_matches(['[', ']', '"']).replace("\",\"", ", "))));
    }
    facts.extend(run.began.map(|began| ("began", date(began))));
    let took = seconds(run).map(Duration::from_secs_f64);
    facts.extend(took.map(|took| ("duration", format!("{} of updates and evaluations", about(took)))));
    if !facts.is_empty() {
        facts_table(page, facts.iter().map(|(name, value)| (*name, value.as_str())));
    }
}

/// Writes a table of names and values.
fn facts_table<'a>(page: &mut Html, facts: impl Iterator<Item = (&'a str, &'a str)>) {
    page.raw("<div class=\"wide\"><table>\n<tbody>\n");
    for (name, value) in facts {
        page.raw("<tr><th scope=\"row\">").text(name).raw("</th><td dir=\"auto\">").text(one_line(value));
        page.raw("</td></tr>\n");
    }
    page.raw("</tbody></table></div>\n");
}

/// Returns the explanation of the numbers at the ends of these runs.
fn ends_note(runs: &[Run]) -> String {
    let updates = |run: &Run| {
        let counted = ["objective/scores", "loss"].into_iter().find_map(|name| run.points(name));
        counted.map_or(0, <[_]>::len)
    };
    match runs {
        [run] => words(updates(run)),
        _ => format!(
            "start and end are means of the first and of the last tenth of the updates, at most {MOST_VALUES}, those of held-out rows single \
             evaluations"
        ),
    }
}

fn verdicts(page: &mut Html, runs: &[Run]) {
    page.raw("<section id=\"verdict\">\n<h2>Verdict</h2>\n");
    for (at, run) in runs.iter().enumerate() {
        heading(page, runs, at);
        summary(page, run);
        page.raw("<ul class=\"verdict\">\n");
        for finding in verdict(run) {
            let (class, sign) = match finding.mark {
                Mark::Good => ("good", "\u{2713}"),
                Mark::Neutral => ("neutral", "\u{b7}"),
                Mark::Bad => ("bad", "!"),
            };
            page.raw("<li class=\"").raw(class).raw("\"><b aria-hidden=\"true\">").raw(sign).raw("</b> ");
            page.text(&finding.text).raw("</li>\n");
        }
        page.raw("</ul>\n");
    }
    page.raw("<p class=\"note\">In the verdict and beside the curves ")
        .text(ends_note(runs))
        .raw(".</p>\n</section>\n");
}

/// Writes the settings that at least two of several runs have, with different values. The others are counted: runs of different commands
/// have hundreds of them.
fn differences(page: &mut Html, runs: &[Run]) {
    if runs.len() < 2 {
        return;
    }
    let values = |name: &str| runs.iter().filter_map(|run| run.setting(name)).collect::<Vec<_>>();
    let (unshared, shared): (Vec<&str>, Vec<&str>) =
        setting_names(runs).into_iter().partition(|name| values(name).len() == 1);
    let differing: Vec<&str> = shared
        .into_iter()
        .filter(|name| *name != "output_dir")
        .filter(|name| values(name).windows(2).any(|pair| pair[0] != pair[1]))
        .collect();
    page.raw("<section id=\"differences\">\n<h2>Settings that differ</h2>\n");
    if differing.is_empty() {
        page.raw("<p>None, but the folder.</p>\n");
    } else {
        settings_table(page, runs, &differing);
    }
    if !unshared.is_empty() {
        page.raw(
            "<p class=\"note\">Settings that only one of these runs has, as those of its command alone, are left out (",
        );
        page.text(unshared.len()).raw("); they are in the <a href=\"#configuration\">configuration</a>.</p>\n");
    }
    page.raw("</section>\n");
}

/// Returns the names of all settings, in the order of the first run that has each.
fn setting_names(runs: &[Run]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for Setting { name, .. } in runs.iter().flat_map(|run| &run.settings) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

/// Writes a table of settings with a column for each run. Values that may be secret are left out, because others may read the page.
fn settings_table(page: &mut Html, runs: &[Run], names: &[&str]) {
    page.raw("<div class=\"wide\"><table>\n<thead><tr><th scope=\"col\">setting</th>");
    for at in 0..runs.len() {
        page.raw("<th scope=\"col\">");
        key(page, runs, at);
        page.raw("</th>");
    }
    page.raw("</tr></thead>\n<tbody>\n");
    for name in names {
        page.raw("<tr><th scope=\"row\">").text(name).raw("</th>");
        for run in runs {
            page.raw("<td dir=\"auto\">").text(one_line(run.public_setting(name).unwrap_or("\u{2013}"))).raw("</td>");
        }
        page.raw("</tr>\n");
    }
    page.raw("</tbody></table></div>\n");
}

fn curves(page: &mut Html, runs: &[Run]) {
    let charts = Charts::of(runs);
    let columns = (MOST_POINTS / (3 * charts.curves().max(1))).clamp(*COLUMNS.start(), *COLUMNS.end());
    page.raw("<section id=\"curves\">\n<h2>Curves</h2>\n<p class=\"controls\" id=\"smoothing\"");
    page.raw(if charts.is_smoothed() { ">" } else { " hidden>" });
    page.raw("<label><input type=\"checkbox\" id=\"show-line\" checked> smoothed</label> ");
    page.raw("<label><input type=\"checkbox\" id=\"show-each\" checked> every update</label></p>\n");
    for note in incomparable(runs) {
        page.raw("<p class=\"note\">").raw(note).raw("</p>\n");
    }
    let grid = |page: &mut Html, charts: &[Chart<'_>]| {
        page.raw("<div class=\"grid\">\n");
        charts.iter().for_each(|chart| chart.draw(page, columns));
        page.raw("</div>\n");
    };
    for section in &charts.sections {
        page.raw("<h3>").text(section.title).raw("</h3>\n");
        grid(page, &section.charts);
    }
    if !charts.others.is_empty() {
        page.raw("<details><summary>Other metrics (").text(charts.others.len()).raw(")</summary>\n");
        grid(page, &charts.others);
        page.raw("</details>\n");
    }
    if !charts.constant.is_empty() {
        page.raw("<p class=\"note\">The same in all updates: ");
        for (at, (name, value)) in charts.constant.iter().enumerate() {
            page.raw(if at > 0 { ", " } else { "" }).text(name).raw("\u{a0}=\u{a0}").text(number(*value, 6));
        }
        page.raw(".</p>\n");
    }
    if !charts.equal.is_empty() {
        page.raw("<p class=\"note\">The same numbers as another curve: ");
        for (at, (name, other)) in charts.equal.iter().enumerate() {
            page.raw(if at > 0 { ", " } else { "" }).text(name).raw("\u{a0}=\u{a0}").text(other);
        }
        page.raw(".</p>\n");
    }
    page.raw("<p class=\"note\">The numbers beside the titles are those of the verdict at the end. Bold lines are moving means over as many \
              updates, which begin and end with the numbers of the verdict; pale ones are the values of each update, thinned to the least \
              and the greatest of each column where there are many. A flag above a chart is an alarm, and one that points left a \
              rollback.</p>\n</section>\n");
}

/// Settings of the scale of a run's scores.
const REWARD_SETTINGS: [&str; 10] = [
    "reward_model_path",
    "reward_label",
    "reward",
    "reward_command",
    "reward_url",
    "reward_weights",
    "reward_normalize",
    "reward_scale",
    "reward_clip",
    "reward_label_column",
];

/// Returns a sentence for each reason why curves of these runs are not on one scale.
fn incomparable(runs: &[Run]) -> Vec<&'static str> {
    let scored: Vec<&Run> = runs.iter().filter(|run| run.points("objective/scores").is_some()).collect();
    let rewards = |run: &Run| REWARD_SETTINGS.map(|name| run.setting(name).map(String::from));
    // The file of the chat template does not matter.
    let tokenizer = |run: &Run| {
        let (_, tokenizer) = run.facts.iter().find(|(name, _)| name == "tokenizer")?;
        Some(tokenizer.split("; chat template: ").next().unwrap_or_default().to_string())
    };
    let tokenizers: Vec<String> = runs.iter().filter_map(tokenizer).collect();
    let mut notes = Vec::new();
    if scored.iter().any(|run| rewards(run) != rewards(scored[0])) {
        notes.push("The rewards of these runs differ: their scores are not on one scale.");
    }
    if tokenizers.iter().any(|tokenizer| *tokenizer != tokenizers[0]) {
        notes.push("The tokenizers of these runs differ: lengths, and numbers per token, are not on one scale.");
    }
    notes
}

/// Writes the samples of each run: lists of the prompts to look at first, and the prompts with their responses.
fn samples(page: &mut Html, runs: &[Run]) {
    page.raw("<section id=\"samples\">\n<h2>Samples</h2>\n");
    if runs.iter().all(|run| run.prompts.is_empty()) {
        page.raw("<p>The run has written no samples.</p>\n</section>\n");
        return;
    }
    page.raw(CONTROLS);
    for (at, run) in runs.iter().enumerate().filter(|(_, run)| !run.prompts.is_empty()) {
        heading(page, runs, at);
        run_samples(page, run, at, MOST_SAMPLE_BYTES / runs.len());
    }
    page.raw("</section>\n");
}

/// The controls of samples, except the one for the shades of tokens. They need the script, which shows them.
const CONTROLS: &str = "\
<p class=\"controls\" id=\"browse\" hidden>\
<label>order <select id=\"order\"><option value=\"\">as listed</option><option value=\"changed\">most changed</option>\
<option value=\"worst\">worst first</option><option value=\"best\">best first</option></select></label> \
<label>from <select id=\"source\"><option value=\"\">all</option></select></label> \
<label>text <input type=\"search\" id=\"search\"></label> <span id=\"found\" role=\"status\"></span></p>\n";

fn run_samples(page: &mut Html, run: &Run, at: usize, most_bytes: usize) {
    let highlights = Highlights::of(&run.prompts, HIGHLIGHTS);
    // Prompts are taken in the order of importance until the page has enough of them, then shown in the order of the run.
    let mut shown = Vec::new();
    let mut bytes = 0;
    for place in highlights.first(run.prompts.len()) {
        let mut part = Html::default();
        prompt(&mut part, &run.prompts[place], at, place);
        bytes += part.len();
        if bytes > most_bytes && !shown.is_empty() {
            break;
        }
        shown.push((place, part));
    }
    shown.sort_by_key(|(place, _)| *place);
    if !run.frame.is_empty() {
        frame(page, &run.frame);
    }
    let responses = || shown.iter().flat_map(|(place, _)| &run.prompts[*place].responses);
    if responses().any(is_shaded) {
        page.raw("<p class=\"controls\"><label><input type=\"checkbox\" class=\"show-shades\"> shade tokens by their probability: ");
        page.raw("the darker, the less probable");
        let has_turns = responses().any(|response| response.turns.is_some());
        page.raw(if has_turns {
            "; turns are then shown as the policy reads them, <i>what it did not write</i> in italics"
        } else {
            ""
        });
        page.raw("</label></p>\n");
    }
    let lists = [("Most changed", &highlights.changed), ("Worst", &highlights.worst), ("Best", &highlights.best)];
    for (name, places) in lists.into_iter().filter(|(_, places)| !places.is_empty()) {
        page.raw("<p class=\"list\">").raw(name).raw(":");
        for &place in places.iter().filter(|place| shown.iter().any(|(other, _)| other == *place)) {
            let prompt = &run.prompts[place];
            let value = if name == "Most changed" { prompt.change().unwrap_or(0.0) } else { prompt.last() };
            let sign = if name == "Most changed" && value > 0.0 { "+" } else { "" };
            page.raw(" <a href=\"#p").text(at).raw("-").text(place).raw("\">").text(place + 1).raw("</a>\u{a0}(");
            page.raw(sign).text(number(value, 3)).raw(")");
        }
        page.raw("</p>\n");
    }
    if shown.len() < run.prompts.len() {
        page.raw("<p class=\"note\">").text(shown.len()).raw(" of ").text(run.prompts.len());
        page.raw(" prompts are shown; all responses are in the run's folder <code>samples/</code>.</p>\n");
    }
    page.raw("<div class=\"prompts\">\n");
    for (_, part) in &shown {
        page.append(part);
    }
    page.raw("</div>\n");
}

/// Writes the text around all prompts, once.
fn frame(page: &mut Html, frame: &Frame) {
    page.raw("<details class=\"frame\"><summary>All prompts begin and end with this text, which is left out below");
    page.raw("</summary>\n");
    for (name, part) in [("Before each prompt:", &frame.before), ("After each prompt:", &frame.after)] {
        if !part.is_empty() {
            page.raw("<p class=\"note\">").raw(name).raw("</p>\n");
            text(page, &Cut::new(part), "prompt");
        }
    }
    page.raw("</details>\n");
}

/// Writes a prompt with its first and its last response; the responses between them are folded.
fn prompt(page: &mut Html, prompt: &Prompt, run: usize, place: usize) {
    page.raw("<article id=\"p").text(run).raw("-").text(place).raw("\" data-source=\"").text(prompt.source.name());
    page.raw("\" data-score=\"").text(data(prompt.last()));
    page.raw("\" data-change=\"").text(data(prompt.change().map_or(f64::NAN, f64::abs))).raw("\">\n");
    page.raw("<h4>").text(place + 1).raw(" <span class=\"unit\">").text(prompt.source.name()).raw("</span></h4>\n");
    text(page, &prompt.text, "prompt");
    let (first, rest) = prompt.responses.split_first().expect("a prompt has a response");
    response(page, first);
    if let Some((last, between)) = rest.split_last() {
        if !between.is_empty() {
            page.raw("<details><summary>").text(between.len()).raw(" between</summary>\n");
            between.iter().for_each(|between| response(page, between));
            page.raw("</details>\n");
        }
        response(page, last);
    }
    page.raw("</article>\n");
}

/// Returns a number for the script.
fn data(value: f64) -> String {
    if value.is_finite() { value.to_string() } else { String::new() }
}

/// Training command of a run, with its preset.
enum Kind {
    Ppo(Preset),
    Reward(Preset),
    Sft(Preset),
    Dpo,
    Distill,
}

impl Kind {
    fn command(&self) -> &'static str {
        match self {
            Self::Ppo(preset) => preset.command(),
            Self::Reward(_) => "reward",
            Self::Sft(_) => "sft",
            Self::Dpo => "dpo",
            Self::Distill => "distill",
        }
    }
}

/// Returns the kind of a run, known by a setting that only this command has.
fn kind(run: &Run) -> Option<Kind> {
    let preset = run.setting("preset").and_then(Preset::named).unwrap_or(Preset::Trl);
    let has = |name| run.setting(name).is_some();
    if has("num_ppo_epochs") {
        Some(Kind::Ppo(preset))
    } else if has("center_rewards_coefficient") {
        Some(Kind::Reward(preset))
    } else if has("packing") {
        Some(Kind::Sft(preset))
    } else if has("ld_alpha") {
        Some(Kind::Dpo)
    } else if has("lmbda") {
        Some(Kind::Distill)
    } else {
        None
    }
}

/// Returns the defaults of a run's settings: those of its command with its preset.
fn defaults(run: &Run) -> Vec<Setting> {
    let config = match kind(run) {
        Some(Kind::Ppo(preset)) => serde_json::to_value(PpoConfig::with_preset(preset, "", "", "", "")),
        Some(Kind::Reward(preset)) => serde_json::to_value(RewardConfig::with_preset(preset, "", "", "")),
        Some(Kind::Sft(preset)) => serde_json::to_value(SftConfig::with_preset(preset, "", "", "")),
        Some(Kind::Dpo) => serde_json::to_value(DpoConfig::new("", "", "")),
        Some(Kind::Distill) => serde_json::to_value(DistillConfig::new("", "", "", "")),
        None => return Vec::new(),
    };
    config
        .ok()
        .and_then(|config| config.as_object().map(|settings| settings_of(&written(settings.clone()))))
        .unwrap_or_default()
}

/// Returns whether a run has another value of a setting than its default, if that is known.
fn is_changed(runs: &[Run], defaults: &[Vec<Setting>], name: &str) -> bool {
    runs.iter().zip(defaults).any(|(run, defaults)| {
        let default = defaults.iter().find(|default| default.name == name);
        default.is_some_and(|default| run.setting(name).is_some_and(|value| value != default.value))
    })
}

fn configuration(page: &mut Html, runs: &[Run]) {
    page.raw("<section id=\"configuration\">\n<h2>Configuration</h2>\n");
    let names = setting_names(runs);
    let defaults: Vec<Vec<Setting>> = runs.iter().map(defaults).collect();
    if names.is_empty() {
        page.raw("<p>The settings could not be read.</p>\n");
    } else {
        let changed: Vec<&str> = names.iter().copied().filter(|name| is_changed(runs, &defaults, name)).collect();
        if !changed.is_empty() {
            page.raw("<h3>Settings with other values than their defaults</h3>\n");
            settings_table(page, runs, &changed);
        }
        page.raw("<details><summary>All ").text(names.len()).raw(" settings</summary>\n");
        settings_table(page, runs, &names);
        page.raw("</details>\n");
    }
    page.raw("</section>\n");
}

/// Writes the alarms of a run, each with its update, its cause and what to try.
fn alarms(page: &mut Html, run: &Run) {
    if run.alarms.is_empty() {
        page.raw("<p>No alarm is recorded.</p>\n");
        return;
    }
    page.raw("<dl class=\"alarms\">\n");
    for alarm in run.alarms.iter().take(MOST_ALARMS) {
        let sign = if alarm.is_rollback() { "\u{21b6}" } else { "!" };
        page.raw("<dt class=\"bad\"><b aria-hidden=\"true\">").raw(sign).raw("</b> ").text(one_line(&alarm.name));
        page.raw(" <span class=\"unit\">update ").text(alarm.step).raw("</span></dt>\n");
        let (cause, advice) = alarm.cause_and_advice();
        page.raw("<dd>").text(one_line(cause)).raw("</dd>\n");
        if let Some(advice) = advice {
            page.raw("<dd><span class=\"unit\">To try:</span> ").text(one_line(advice)).raw("</dd>\n");
        }
    }
    page.raw("</dl>\n");
    if let more @ 1.. = run.alarms.len().saturating_sub(MOST_ALARMS) {
        page.raw("<p class=\"note\">").text(more).raw(" more are in <code>alarms.jsonl</code>.</p>\n");
    }
}

/// Writes the alarms of each run, the facts of its model card with the checks at its start, and notes on parts that could not be read.
fn checks(page: &mut Html, runs: &[Run]) {
    page.raw("<section id=\"checks\">\n<h2>Alarms and checks</h2>\n");
    for (at, run) in runs.iter().enumerate() {
        heading(page, runs, at);
        alarms(page, run);
        if !run.facts.is_empty() {
            facts_table(page, run.facts.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        }
        for note in &run.notes {
            page.raw("<p class=\"note\">").text(one_line(note)).raw("</p>\n");
        }
    }
    page.raw("</section>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::read::Series;
    use crate::report::samples::Response;

    fn page_of(run: Run) -> String {
        page(&[run])
    }

    fn response(score: f64, tokens: &[(&str, f64)]) -> Response {
        let tokens: Vec<(String, f64)> = tokens.iter().map(|(text, p)| (text.to_string(), *p)).collect();
        let text: String = tokens.iter().map(|(text, _)| text.as_str()).collect();
        let text = Cut::new(&text);
        Response { step: 1, text, score, rewards: Vec::new(), finish: None, num_tokens: None, tokens, turns: None }
    }

    fn run_with(responses: Vec<Response>) -> Run {
        let prompts =
            vec![Prompt { source: crate::report::samples::Source::Samples, text: Cut::new("Who?"), responses }];
        Run { label: "mine".into(), prompts, ..Run::default() }
    }

    #[test]
    fn the_page_begins_with_title_command_model_data_date_and_duration() {
        let series = |name: &str, values: &[f64]| Series {
            name: name.into(),
            points: values.iter().enumerate().map(|(at, &value)| (10.0 * (at as f64 + 1.0), value)).collect(),
        };
        let settings =
            [("packing", "false"), ("model_name_or_path", "org/tiny"), ("dataset_name", "[\"a.jsonl\",\"b.jsonl\"]")];
        let mut run = Run {
            label: "mine".into(),
            // Two lines of ten updates each of 3 and 6 seconds.
            metrics: vec![series("loss", &[2.0, 1.0]), series("time/update", &[3.0, 6.0])],
            settings: settings.iter().map(|(name, value)| Setting::of(name, value)).collect(),
            began: Some(1_795_770_900),
            ..Run::default()
        };
        let page = page_of(run);
        let (top, rest) = page.split_once("<ul class=\"verdict\">").unwrap();
        for part in [
            "<title>mine: rlhf sft</title>",
            "<h1>mine: rlhf sft</h1>",
            "command</th><td dir=\"auto\">rlhf sft</td>",
            "model</th><td dir=\"auto\">org/tiny</td>",
            "data</th><td dir=\"auto\">a.jsonl, b.jsonl</td>",
            "began</th><td dir=\"auto\">2026-11-27 09:15 UTC</td>",
            "duration</th><td dir=\"auto\">1.5 min of updates and evaluations</td>",
        ] {
            assert!(top.contains(part), "no {part} in {top}");
        }
        assert!(rest.contains("start and end are the first and the last update"), "{rest}");
        run = Run { label: "mine".into(), command_line: Some("rlhf sft\n  --x 1".into()), ..Run::default() };
        let page = page_of(run);
        assert_eq!(page.matches("rlhf sft --x 1").count(), 1, "the command is there once");
    }

    #[test]
    fn a_score_of_0_is_shown_and_a_missing_one_is_named() {
        let page = page_of(run_with(vec![response(0.0, &[]), response(f64::NAN, &[])]));
        assert!(page.contains("score <b>0</b>") && page.contains("\u{b7} no score"), "{page}");
        let page = page_of(run_with(vec![response(1.0, &[]), response(0.0, &[])]));
        assert!(page.contains("data-score=\"0\" data-change=\"1\""), "{page}");
        assert!(page.contains(">Worst:") && page.contains("(0)"), "{page}");
    }

    #[test]
    fn shades_are_offered_where_a_token_has_one() {
        let offered = |probability: f64| {
            let page = page_of(run_with(vec![response(1.0, &[("a", 1.0), ("b", probability)])]));
            page.contains("class=\"show-shades\"")
        };
        assert_eq!([offered(0.5), offered(1.0), offered(0.999)], [true, false, false]);
        assert!(!page_of(run_with(vec![response(1.0, &[])])).contains("class=\"show-shades\""));
    }

    #[test]
    fn the_text_around_all_prompts_is_shown_once() {
        let mut run = run_with(vec![response(1.0, &[])]);
        run.frame = Frame { before: "<|system|>Be kind.<|user|>".into(), after: "<|assistant|>".into() };
        let page = page_of(run);
        assert_eq!(page.matches("&lt;|system|&gt;Be kind.").count(), 1, "{page}");
        assert_eq!(page.matches("&lt;|assistant|&gt;").count(), 1, "{page}");
        assert!(!page_of(run_with(Vec::from([response(1.0, &[])]))).contains("class=\"frame\""));
    }

    #[test]
    fn the_largest_parts_are_left_out_of_a_page_that_would_be_too_large() {
        let part = |len: usize| {
            let mut part = Html::default();
            part.text("x".repeat(len));
            part
        };
        let mut parts = [("verdict", part(100)), ("curves", part(9000)), ("samples", part(2000))];
        leave_out(&mut parts, 20_000);
        assert_eq!(parts.iter().map(|(_, part)| part.len()).collect::<Vec<_>>(), [100, 9000, 2000]);
        leave_out(&mut parts, 3000);
        assert!(parts[0].1.len() == 100 && parts[1].1.len() < 300 && parts[2].1.len() == 2000);
        let [_, (_, note), _] = parts;
        let note = note.finish();
        assert!(note.contains("id=\"curves\"") && note.contains("9000 bytes"), "{note}");
    }
}
