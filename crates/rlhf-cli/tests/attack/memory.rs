//! Inputs that are small, or cheap to send, and would take much memory.

use super::folders::Dice;
use super::{Outcomes, cases};
use crate::support::{Child, golden};
use rlhf::data::{Dataset, RowReader};
use rlhf::model::{CausalLm, ModelOptions};
use rlhf::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::io::{BufReader, Write};

/// Most MiB that a template may take: its 256 MiB of text and values, and as much again while a list or a text grows. Of 600 cases the largest
/// took 272.
const MOST: u64 = 600;

/// The process's memory and its peak since the last call, in MiB.
fn memory() -> [u64; 2] {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    };
    let found = ["VmRSS:", "VmHWM:"].map(mib);
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    found
}

/// An expression that makes something large out of `x` or of nothing.
fn expression(dice: &mut Dice, depth: usize) -> String {
    const BASES: [&str; 12] = [
        "x",
        "x",
        "'a' * N",
        "'\u{e9} ' * N",
        "range(N)",
        "range(N) | list",
        "[0] * N",
        "[[]] * N",
        "messages",
        "messages | string",
        "{'a': x, 'b': [x]}",
        "('a\\n' * N)",
    ];
    const STEPS: [&str; 46] = [
        "(E) | list",
        "(E) | map('string') | list",
        "(E) | map('list') | list",
        "(E) | map('default', 'x') | list",
        "(E) | select | list",
        "(E) | chain(E) | list",
        "(E) | string",
        "(E) | pprint",
        "(E) | tojson",
        "(E) | tojson(indent=N)",
        "(E) | tojson(separators=['a' * N, 'b'])",
        "(E) * N",
        "N * (E)",
        "(E) + (E)",
        "(E) ~ (E)",
        "[E, E]",
        "[E, E, E, E] | tojson",
        "{'a': E, 'b': E} | string",
        "(E) | join(E)",
        "(E) | join('ab' * N)",
        "(E) | replace('a', E)",
        "(E).replace('', 'ab' * N)",
        "(E) | indent(N)",
        "(E) | indent(N, first=true, blank=true)",
        "(E).split('a')",
        "(E).split()",
        "(E).splitlines()",
        "(E).rsplit('a')",
        "(E) | lines",
        "(E).ljust(N, '\u{e9}')",
        "(E).zfill(N)",
        "(E) | batch(N, E) | list",
        "(E) | slice(N) | list",
        "(E) | sort | list",
        "(E) | unique | list",
        "(E) | zip(E) | list",
        "(E) | groupby('a') | list",
        "(E)[::-1]",
        "(E)[:N]",
        "(E) | reverse | list",
        "dict(a=E, b=E) | items | list",
        "(E) | upper",
        "(E) | e",
        "('{:>{}}' * 99).format(1, N)",
        "('{0:>{1}}' * 9999).format(1, N)",
        "('%*d' * 9) | format(N, 1, N, 1, N, 1, N, 1, N, 1, N, 1, N, 1, N, 1, N, 1)",
    ];
    const SIZES: [&str; 7] = ["9", "999", "9999", "99999", "900000", "1000000000", "99999999999"];
    let mut text = dice.pick(&BASES).to_string();
    for _ in 0..dice.roll(depth + 1) {
        let step = dice.pick(&STEPS);
        // Only one of the places takes what there is, so that the source stays short.
        let other = dice.pick(&["x", "range(99999) | list", "'b' * 99999", "messages"]);
        text = step.replacen('E', &text, 1).replace('E', other);
    }
    while text.contains('N') {
        text = text.replacen('N', dice.pick(&SIZES), 1);
    }
    text
}

/// A template that repeats an expression, and keeps what it makes.
fn template(dice: &mut Dice) -> String {
    let mut e = |depth| expression(dice, depth);
    let (a, b, c) = (e(2), e(3), e(1));
    let names: String = (0..300).map(|i| format!("a{i}, ")).collect();
    let many = |text: String| (0..40).map(|i| text.replace("NAME", &format!("v{i}"))).collect::<String>();
    let start =
        format!("{{% set x = {} %}}", ["'ab'", "[1, 'ab']", "range(99999) | list", "'ab' * 99999"][dice.roll(4)]);
    let rest = match dice.roll(12) {
        0 => format!("{{% set y = {b} %}}{{{{ y | length }}}}"),
        1 => format!("{{% for i in range(99999) %}}{{% set y = {b} %}}{{% endfor %}}"),
        2 => format!(
            "{{% set ns = namespace(x=x) %}}{{% for i in range(99999) %}}{{% set x = ns.x %}}{{% set ns.x = {a} %}}{{% endfor %}}"
        ),
        3 => format!(
            "{{% macro f(n) %}}{}{{% if n > 0 %}}{{{{ f(n - 1) }}}}{{% endif %}}{{% endmacro %}}{{{{ f(99) }}}}",
            many(format!("{{% set NAME = {a} %}}"))
        ),
        4 => format!(
            "{{% for i in range(99999) %}}{{% for j in range(99) %}}{{% set y = {c} %}}{{% macro f({names}z) %}}{{{{ y }}}}{{% endmacro %}}{{% endfor %}}{{% endfor %}}"
        ),
        5 => format!(
            "{{% for i in range(9) recursive %}}{}{{{{ loop(range(9)) }}}}{{% endfor %}}",
            many(format!("{{% set NAME = {a} %}}"))
        ),
        6 => format!("{{% set y %}}{{% for i in range(99999) %}}{{{{ {a} }}}}{{% endfor %}}{{% endset %}}{{{{ y }}}}"),
        7 => format!("{{% filter upper %}}{{% for i in range(999) %}}{{{{ {b} }}}}{{% endfor %}}{{% endfilter %}}"),
        8 => format!("{{{{ {c} * 99999 }}}}").repeat(1 + dice.roll(4000)),
        9 => format!("{{{{ raise_exception({b}) }}}}"),
        10 => many(format!("{{% set NAME = {b} %}}")),
        _ => format!(
            "{{% macro f(a) %}}{{{{ caller(a) }}}}{{{{ a }}}}{{% endmacro %}}{{% for i in range(999) %}}{{% call(u) f({b}) %}}{{{{ u }}}}{{% endcall %}}{{% endfor %}}"
        ),
    };
    start + &rest
}

#[test]
fn no_template_takes_more_memory_than_its_limit() {
    let found =
        Child { test: "attack::memory::child_renders_templates_that_grow", address_space_gib: 8, vars: &[] }.run();
    let (went_well, refused) = (found["went_well"].as_u64().unwrap(), found["refused"].as_u64().unwrap());
    assert!(refused > went_well / 2, "the templates grow too little: {found}");
}

#[test]
#[ignore = "a process of its own, started by no_template_takes_more_memory_than_its_limit"]
fn child_renders_templates_that_grow() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("chat_template.jinja");
    let row = format!("{}\n", json!({"prompt": [{"role": "user", "content": "A text of words. ".repeat(40)}]}));
    // Readers keep their input until they end.
    let rows: &'static str = Box::leak(row.into_boxed_str());
    let mut tokenizer = Tokenizer::from_pretrained(&golden().join("models/llama_tied")).unwrap();
    let mut outcomes = Outcomes::default();
    for case in 0..cases(300) {
        let source = template(&mut Dice(case));
        std::fs::write(&file, &source).unwrap();
        let [before, _] = memory();
        let begun = std::time::Instant::now();
        outcomes.note(&format!("case {case}"), || {
            tokenizer.use_chat_template(&file)?;
            RowReader::lines("rows", BufReader::new(rows.as_bytes()), true)
                .next(9)?
                .expect("a row")
                .prompts(&tokenizer, 512, 200)
        });
        let [_, peak] = memory();
        let shown: String = source.chars().take(600).collect();
        let taken = peak.saturating_sub(before);
        let _ = writeln!(std::io::stdout(), "case {case}: {taken} MiB, {:.1} s", begun.elapsed().as_secs_f64());
        assert!(taken < MOST, "case {case} takes {taken} MiB: {shown}");
    }
    Child::reports(&outcomes.report());
}

#[test]
fn long_rows_take_memory_by_their_length_and_those_that_do_not_fit_are_one_error() {
    let found = Child { test: "attack::memory::child_reads_long_rows", address_space_gib: 6, vars: &[] }.run();
    let taken: Vec<u64> = found["taken"].as_array().unwrap().iter().map(|mib| mib.as_u64().unwrap()).collect();
    // The scores of 20,000 queries and keys are 1.6 GB for each head.
    assert!(taken.iter().all(|mib| *mib < 500), "{found}");
    let error = found["error"].as_str().unwrap();
    super::check_error("a row that does not fit", error);
    let words = "a pass over a row of at most 12000000 tokens: out of memory: cannot allocate";
    assert!(error.starts_with(words), "{error}");
}

#[test]
#[ignore = "a process of its own, started by long_rows_take_memory_by_their_length_and_those_that_do_not_fit_are_one_error"]
fn child_reads_long_rows() {
    let scratch = tempfile::tempdir().unwrap();
    let row = |len: i64| vec![(0..len).map(|t| 5 + (7 * t) % 80).collect::<Vec<i64>>()];
    let model = |name: &str| {
        let (from, to) = (golden().join("models").join(name), scratch.path().join(name));
        std::fs::create_dir(&to).unwrap();
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
        config["max_position_embeddings"] = json!(20_000_000);
        std::fs::write(to.join("config.json"), config.to_string()).unwrap();
        std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).unwrap();
        CausalLm::from_pretrained(&to, ModelOptions::default()).unwrap()
    };
    let taken = |name: &str, len: i64| {
        let model = model(name);
        let [before, _] = memory();
        tch::no_grad(|| model.logits(&row(len))).unwrap();
        memory()[1].saturating_sub(before)
    };
    let taken = [taken("gpt_neox", 20_000), taken("llama_tied", 20_000)];
    // Its queries, keys and values alone are 4.6 GB.
    let too_long = tch::no_grad(|| model("mistral").logits(&row(12_000_000)).map(drop));
    let error = too_long.err().map(|error| error.to_string());
    Child::reports(&json!({"taken": taken, "error": error}));
}

/// A row of megabytes in one of the forms that are trained on or scored, and a limit on its tokens.
fn long_row(dice: &mut Dice, words_only: bool) -> (Value, &'static str) {
    let units = ["word ", "The film, ", "9", "a", " ", "\n", "\u{e9}t\u{e9} ", "\u{4e2d}\u{6587}", "\u{1f600}"];
    let unit = dice.pick(&units[..if words_only { 2 } else { units.len() }]);
    let long = unit.repeat(((2 << 20) + dice.roll(2 << 20)) / unit.len());
    let short = "a b";
    let turns = |question: &str, response: &str| json!([{"role": "user", "content": question}, {"role": "assistant", "content": response}]);
    match dice.roll(7) {
        0 => (json!({ "text": long }), "sft"),
        1 => (json!({"prompt": long, "completion": short}), "sft"),
        2 => (json!({"prompt": short, "completion": long}), "sft"),
        3 => (json!({"messages": turns(&long, short)}), "sft"),
        4 => (json!({"messages": turns(short, &long)}), "sft"),
        5 => (json!({"prompt": short, "chosen": long, "rejected": short}), "reward"),
        _ => (json!({"chosen": turns(short, short), "rejected": turns(&long, short)}), "reward"),
    }
}

#[test]
fn rows_of_megabytes_take_no_more_memory_than_a_few_times_their_size() {
    let found = Child { test: "attack::memory::child_reads_rows_of_megabytes", address_space_gib: 8, vars: &[] }.run();
    assert!(found["went_well"].as_u64().unwrap() > 0, "{found}");
}

#[test]
#[ignore = "a process of its own, started by rows_of_megabytes_take_no_more_memory_than_a_few_times_their_size"]
fn child_reads_rows_of_megabytes() {
    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}";
    let scratch = tempfile::tempdir().unwrap();
    let (rows, template) = (scratch.path().join("rows.jsonl"), scratch.path().join("chat_template.jinja"));
    std::fs::write(&template, TEMPLATE).unwrap();
    let tokenizers = ["models/gpt2", "models/llama_tied", "models/gpt_neox", "tokenizers/t5"].map(|name| {
        let mut tokenizer = Tokenizer::from_pretrained(&golden().join(name)).unwrap();
        tokenizer.use_chat_template(&template).unwrap();
        tokenizer
    });
    let mut outcomes = Outcomes::default();
    for case in 0..cases(200) {
        let mut dice = Dice(case);
        let (at, most) = (dice.roll(tokenizers.len()), dice.pick(&[8, 64, 1024]));
        let (row, kind) = long_row(&mut dice, at == 3);
        let line = row.to_string();
        std::fs::write(&rows, format!("{line}\n")).unwrap();
        let [before, _] = memory();
        outcomes.note(&format!("case {case}: {kind}"), || {
            let dataset = Dataset::read(&rows, "train")?;
            let tokenizer = tokenizers[at].limited_to(most);
            let lens = match kind {
                "sft" => {
                    dataset.demonstrations(&tokenizer, false)?.iter().map(|row| row.tokens.len()).collect::<Vec<_>>()
                }
                _ => dataset
                    .pairs(&tokenizer, true)?
                    .iter()
                    .map(|pair| pair.chosen.len().max(pair.rejected.len()))
                    .collect(),
            };
            assert!(lens.iter().all(|len| *len > most), "case {case}: {lens:?}");
            Ok(())
        });
        let taken = memory()[1].saturating_sub(before);
        let _ = writeln!(std::io::stdout(), "case {case}: {taken} MiB for {} KiB", line.len() >> 10);
        // The whole row would take 144 times its size; the largest of these took 5 times.
        assert!(
            taken < 12 * (line.len() as u64 >> 20).max(2),
            "case {case} takes {taken} MiB: {}",
            line.chars().take(80).collect::<String>()
        );
    }
    Child::reports(&outcomes.report());
}
