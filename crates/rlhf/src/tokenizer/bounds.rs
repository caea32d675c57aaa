//! What a chat template may cost. Templates come with models, so they are code of strangers: each operator, filter, test,
//! function and method pays for the text and the values that it makes or reads out of one budget, before it runs, and the
//! whole runs on a thread with a stack of its own.
//!
//! The engine bounds the number of its steps and no more: one step may double a string. So the compiled instructions are
//! rewritten: what can make or read something large is preceded by a filter that pays for it.

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use minijinja::{filters, functions, tests};
use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The longest source, several times any real one.
const MAX_SOURCE: usize = 256 << 10;

/// The most tokens of one block of a source: expressions nest no deeper.
const MAX_TOKENS: usize = 2000;

/// The most bytes that constants of one block can be multiplied to.
const MAX_CONSTANT: u128 = 1 << 20;

/// How deep values may lie in each other.
const MAX_DEPTH: usize = 100;

/// The bytes of text and values that one rendering may make or read, beside a share for those of its messages.
const BUDGET: u64 = 256 << 20;

/// How often the messages of a rendering may be made or read beyond that.
const PER_BYTE: u64 = 16;

/// What one value costs beside its text.
const NODE: u64 = 32;

/// Of the thread that compiles or renders; only what is used is taken from memory.
const STACK: usize = 256 << 20;

thread_local! {
    /// What is left of the budget of the rendering on this thread.
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// A template with its payments, as the engine runs it.
pub(super) struct Program {
    main: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

impl Program {
    /// Compiles `source`.
    pub(super) fn compile(source: String, syntax: &SyntaxConfig) -> Result<Self, Error> {
        if source.len() > MAX_SOURCE {
            let message = format!("expected at most {MAX_SOURCE} bytes, found {}", source.len());
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        on_a_deep_stack(move || {
            check_blocks(&source, syntax)?;
            let source = kept(source);
            let tree = parse(source, "chat", syntax.clone())?;
            let mut generator = CodeGenerator::new("chat", source);
            generator.compile_stmt(&tree);
            let (main, blocks) = generator.finish();
            let blocks = blocks.iter().map(|(name, block)| (*name, paying(block))).collect();
            Ok(Self { main: paying(&main), blocks })
        })
    }

    /// Renders it with `environment`, which must be one of [`environment`]; `input` bytes of text are in `context`. Before it
    /// begins, `begin` is called on the thread that renders.
    pub(super) fn render(
        &self,
        environment: &'static Environment<'static>,
        context: Value,
        input: usize,
        begin: impl FnOnce() + Send,
    ) -> Result<String, Error> {
        on_a_deep_stack(move || {
            begin();
            LEFT.set(BUDGET.saturating_add(PER_BYTE.saturating_mul(input as u64)));
            let mut text = String::new();
            let mut out = minijinja::machinery::make_string_output(&mut text);
            let done =
                minijinja::machinery::eval(environment, &self.main, context, &self.blocks, &mut out, AutoEscape::None);
            done.map(drop)?;
            Ok(text)
        })
    }
}

/// The source for as long as the program runs, as the engine's instructions need it: equal ones are kept once.
fn kept(source: String) -> &'static str {
    static SOURCES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    let sources = sources.get_or_insert_default();
    match sources.get(source.as_str()) {
        Some(kept) => kept,
        None => {
            let source: &'static str = source.leak();
            sources.insert(source);
            source
        }
    }
}

/// Runs `run` where deep recursion does not end the process; a panic is an error.
fn on_a_deep_stack<T: Send>(run: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().name("chat template".into()).stack_size(STACK).spawn_scoped(scope, run);
        let thread = thread.map_err(|e| failed(format!("cannot start a thread to render it: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("the template engine failed on it".into())))
    })
}

/// Looks at each block of a source before it is parsed: the parser and the compiler recurse over its tokens, and the
/// compiler computes what is constant.
fn check_blocks(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    #[derive(Default)]
    struct Block {
        tokens: usize,
        bytes: u128,
        repeats: u128,
        multiplies: bool,
        raises: bool,
    }
    let mut block = Block { repeats: 1, ..Block::default() };
    for token in tokenize(source, false, syntax.clone()) {
        // What is no token is the parser's to tell.
        let Ok((token, span)) = token else { return Ok(()) };
        block.tokens += 1;
        match token {
            Token::VariableStart | Token::BlockStart => block = Block { repeats: 1, ..Block::default() },
            Token::Str(text) => block.bytes += text.len() as u128,
            Token::String(text) => block.bytes += text.len() as u128,
            Token::BracketOpen | Token::Comma => block.bytes += u128::from(NODE),
            Token::Int(number) => block.repeats = block.repeats.saturating_mul(u128::from(number) + 1),
            Token::Int128(_) => block.repeats = u128::MAX,
            Token::Mul => block.multiplies = true,
            Token::Pow => block.raises = true,
            _ => {}
        }
        let repeats = if block.raises { u128::MAX } else { block.repeats };
        let wrong = if block.tokens > MAX_TOKENS {
            format!("expected at most {MAX_TOKENS} tokens in one block")
        } else if block.multiplies && block.bytes.saturating_mul(repeats) > MAX_CONSTANT {
            format!("expected constants that multiply to at most {MAX_CONSTANT} bytes")
        } else {
            continue;
        };
        let message = format!("{wrong}, found more in line {}", span.start_line);
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(())
}

/// The filters that pay; no source can write these names.
const BEFORE: &str = "@before";
const AFTER: &str = "@after";
const BUILT: &str = "@built";

/// No place in the engine's cache of filters.
const UNCACHED: u8 = !0;

/// `code` with a payment before each instruction that may cost more than a step.
fn paying(code: &Instructions<'static>) -> Instructions<'static> {
    type Code = Vec<Instruction<'static>>;
    let filter = |name, count| Instruction::ApplyFilter(name, Some(count), UNCACHED);
    let before = |operation: &'static str, count: u16| -> Code {
        let mut code = vec![Instruction::LoadConst(Value::from(operation)), filter(BEFORE, count + 1)];
        if count > 1 {
            code.push(Instruction::UnpackList(usize::from(count)));
        }
        code
    };
    let then = |mut code: Code, instruction: &Instruction<'static>, after: Option<&'static str>| {
        code.push(instruction.clone());
        code.extend(after.map(|name| filter(name, 1)));
        code
    };
    let replaced = |instruction: &Instruction<'static>| -> Code {
        match instruction {
            Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
            Instruction::LoadConst(value) if value.kind() == ValueKind::Iterable => {
                then(Vec::new(), instruction, Some(AFTER))
            }
            Instruction::Add => then(before("+", 2), instruction, Some(AFTER)),
            Instruction::Mul => then(before("*", 2), instruction, Some(AFTER)),
            Instruction::StringConcat => then(before("~", 2), instruction, None),
            Instruction::Eq
            | Instruction::Ne
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::In
            | Instruction::CompareAndPreserve(_) => then(before("compare", 2), instruction, None),
            Instruction::GetItem => then(before("item", 2), instruction, None),
            Instruction::Slice => then(before("slice", 4), instruction, Some(AFTER)),
            Instruction::SetAttr(_) => then(before("set", 2), instruction, None),
            Instruction::PushLoop(_) | Instruction::UnpackList(_) => then(before("take", 1), instruction, None),
            Instruction::MergeKwargs(count) | Instruction::UnpackLists(count) if *count < usize::from(u16::MAX) => {
                then(before("take", *count as u16), instruction, None)
            }
            Instruction::CallMethod(_, Some(count)) => then(before("call", *count), instruction, None),
            Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::BuildMap(_) => {
                then(Vec::new(), instruction, Some(BUILT))
            }
            other => vec![other.clone()],
        }
    };
    let mut parts: Vec<(u32, Code)> = Vec::new();
    while let Some(instruction) = code.get(parts.len() as u32) {
        parts.push((parts.len() as u32, replaced(instruction)));
    }
    // Where each instruction's part begins, and the end.
    let mut starts = vec![0];
    for (_, part) in &parts {
        starts.push(starts[starts.len() - 1] + part.len() as u32);
    }
    let moved = |target: u32| starts.get(target as usize).copied().unwrap_or(starts[starts.len() - 1]);
    let mut paying = Instructions::new(code.name(), code.source());
    for (at, part) in parts {
        for mut instruction in part {
            match &mut instruction {
                Instruction::Jump(target)
                | Instruction::JumpIfFalse(target)
                | Instruction::JumpIfFalseOrPop(target)
                | Instruction::JumpIfTrueOrPop(target)
                | Instruction::Iterate(target)
                | Instruction::BuildMacro(_, target, _) => *target = moved(*target),
                _ => {}
            }
            match (code.get_span(at), code.get_line(at)) {
                (Some(span), _) => paying.add_with_span(instruction, span),
                (None, Some(line)) => paying.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
                (None, None) => paying.add(instruction),
            };
        }
    }
    paying
}

fn too_much(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Pays `bytes` out of the budget.
pub(super) fn pay(bytes: u64) -> Result<(), Error> {
    let left = LEFT.get().checked_sub(bytes);
    let message = || too_much(format!("makes or reads more than {} MiB of text and values", BUDGET >> 20));
    LEFT.set(left.ok_or_else(message)?);
    Ok(())
}

/// Pays for a look at all that `value` holds; gives how many bytes its text has at most.
fn look(value: &Value, depth: usize) -> Result<u64, Error> {
    pay(NODE)?;
    if let Some(text) = value.as_str() {
        let len = text.len() as u64;
        // Within others it is quoted and escaped.
        return Ok(if depth == 0 { len } else { 6 * len + 2 });
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(2 * NODE);
    }
    if depth == MAX_DEPTH {
        return Err(too_much(format!("expected values at most {MAX_DEPTH} deep in each other, found deeper ones")));
    }
    let mut text = NODE;
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            text = text.saturating_add(look(&value.get_item(&item)?, depth + 1)?);
        }
        text = text.saturating_add(look(&item, depth + 1)?);
    }
    Ok(text)
}

fn look_at_all(values: &[Value]) -> Result<u64, Error> {
    values.iter().try_fold(0, |sum: u64, value| Ok(sum.saturating_add(look(value, 0)?)))
}

/// What it costs to go once over `value`, not into what it holds.
fn size(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => NODE.saturating_mul(value.len().unwrap_or(0) as u64),
    }
}

fn sizes(values: &[Value]) -> u64 {
    values.iter().map(size).fold(NODE, u64::saturating_add)
}

/// Whether `value` is or holds a namespace: one that held itself would never be freed.
fn holds_namespace(value: &Value) -> bool {
    let is_namespace =
        |value: &Value| value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace"));
    let inner = |value: &Value| match value.kind() {
        ValueKind::Map => value.try_iter().is_ok_and(|mut keys| {
            keys.any(|key| value.get_item(&key).is_ok_and(|item| holds_namespace(&item)) || holds_namespace(&key))
        }),
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter().is_ok_and(|mut items| items.any(|i| holds_namespace(&i)))
        }
        _ => false,
    };
    is_namespace(value) || inner(value)
}

/// Pays for an operation on `operands`, the last of which names it; gives them back, the last one first.
fn before(operands: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let operands = operands.into_values();
    let Some((operation, operands)) = operands.split_last() else { return Ok(Value::UNDEFINED) };
    let repeated = |what: &Value, times: &Value| size(what).saturating_mul(times.as_i64().map_or(1, i64::unsigned_abs));
    match (operation.as_str().unwrap_or_default(), operands) {
        ("+" | "take" | "slice", operands) => pay(sizes(operands))?,
        ("*", [a, b]) => pay(repeated(a, b).max(repeated(b, a)).saturating_add(NODE))?,
        ("~" | "compare", operands) => pay(look_at_all(operands)?)?,
        ("item", [base, key]) => {
            let key = look(key, 0)?;
            pay(key.saturating_add(base.as_str().map_or(0, |text| text.len() as u64)))?;
        }
        ("set", [value, _]) => {
            pay(look(value, 0)?.min(NODE))?;
            if holds_namespace(value) {
                return Err(too_much("expected a namespace to hold plain values, found a namespace in it".into()));
            }
        }
        ("call", [_, arguments @ ..]) => pay(look_at_all(arguments)?)?,
        _ => {}
    }
    Ok(match operands {
        [one] => one.clone(),
        several => several.iter().rev().cloned().collect::<Vec<Value>>().into(),
    })
}

/// What is made one by one when it is asked for, as a list: such values could lie in each other without end.
fn settle(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        pay(NODE)?;
        items.push(item);
    }
    Ok(items.into())
}

/// Pays for what was put together, which must not be too deep.
fn built(value: Value) -> Result<Value, Error> {
    let value = settle(value)?;
    look(&value, 0)?;
    Ok(value)
}

/// All whole numbers among `arguments`, named ones included, added up.
fn numbers(arguments: &[Value]) -> u64 {
    let number = |value: &Value| value.as_i64().map_or(0, i64::unsigned_abs);
    let named = |value: &Value| {
        let kwargs = Kwargs::try_from(value.clone()).ok()?;
        Some(kwargs.args().map(|name| kwargs.peek::<Value>(name).map_or(0, |value| number(&value))).sum::<u64>())
    };
    arguments.iter().map(|value| number(value).saturating_add(named(value).unwrap_or(0))).fold(0, u64::saturating_add)
}

/// The widths and precisions that a format asks for.
fn widths(format: &Value, arguments: &[Value]) -> u64 {
    let text = format.as_str().unwrap_or_default();
    let written = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let written = written.map(|digits| digits.parse::<u64>().unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    // `*`, and `{}` within braces, take them from the arguments.
    let taken = if text.contains('*') || text.contains(":{") { numbers(arguments) } else { 0 };
    written.saturating_add(taken)
}

/// Pays for a filter or a method, by its name, of `arguments`: the first is what it is applied to.
fn pay_for(name: &str, arguments: &[Value]) -> Result<(), Error> {
    let Some((subject, others)) = arguments.split_first() else { return Ok(()) };
    match name {
        "default" | "d" | "length" | "count" | "first" | "last" | "attr" | "int" | "float" | "abs" | "round"
        | "bool" | "get" | "list" | "reverse" | "items" | "keys" | "values" | "select" | "reject" | "selectattr"
        | "rejectattr" | "map" | "chain" | "zip" | "find" | "rfind" | "startswith" | "endswith" | "strip"
        | "lstrip" | "rstrip" | "trim" => return pay(sizes(arguments)),
        _ => {}
    }
    let text = look_at_all(arguments)?;
    let of = |value: &Value| look(value, 0);
    let count = |value: &Value| value.as_str().map_or(value.len().unwrap_or(0), str::len) as u64;
    let cost = match name {
        "batch" | "slice" => numbers(others).saturating_mul(NODE).saturating_add(sizes(arguments)),
        "indent" => {
            let lines = subject.to_string().matches('\n').count() as u64 + 1;
            lines.saturating_mul(numbers(others).max(4) + others.iter().map(count).sum::<u64>()).saturating_add(text)
        }
        "replace" => {
            let [old, new] = [others.first(), others.get(1)].map(|value| value.map_or(String::new(), Value::to_string));
            let subject = of(subject)?;
            (subject / (old.len() as u64).max(1) + 1).saturating_mul(new.len() as u64).saturating_add(text)
        }
        // Either may be the separator: `join` is a filter of a list and a method of a string.
        "join" => {
            let between = |list: &Value, separator: &Value| Ok::<_, Error>(count(list).saturating_mul(of(separator)?));
            let separator = others.first().cloned().unwrap_or_default();
            between(subject, &separator)?.max(between(&separator, subject)?).saturating_add(text)
        }
        "format" => {
            let holes = subject.as_str().map_or(0, |text| text.matches(['%', '{']).count() as u64);
            widths(subject, others).saturating_add(text.saturating_mul(holes + 1))
        }
        "sort" | "dictsort" | "unique" | "groupby" | "min" | "max" | "sum" => text.saturating_mul(16),
        "split" | "lines" | "splitlines" => text.saturating_mul(NODE),
        // Letters and escapes that take more bytes than what they stand for.
        _ => text.saturating_mul(6),
    };
    pay(cost)
}

/// Whether what comes of a filter may lie one deeper than what went in.
fn deepens(name: &str) -> bool {
    ["batch", "slice", "groupby", "zip", "items", "dictsort", "map"].contains(&name)
}

/// An environment whose filters, tests, functions and methods all pay; the caller adds to it by [`add_filter`] and
/// [`add_function`].
pub(super) fn environment(syntax: &SyntaxConfig, steps: u64) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_syntax(syntax.clone());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(steps));
    environment.set_formatter(|out, state, value| {
        let text = look(value, 0)?;
        let escaped = !matches!(state.auto_escape(), AutoEscape::None);
        pay(if escaped { text.saturating_mul(6) } else { text })?;
        minijinja::escape_formatter(out, state, value)
    });
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        pay_for(method, &all)?;
        settle(minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)?)
    });
    environment.add_filter(BEFORE, before);
    environment.add_filter(AFTER, settle);
    environment.add_filter(BUILT, built);
    macro_rules! filters {
        ($($name:literal: $filter:expr,)*) => {
            $(add_filter(&mut environment, $name, Value::from_function($filter));)*
        };
    }
    filters! {
        "safe": filters::safe, "escape": filters::escape, "e": filters::escape, "lower": filters::lower,
        "upper": filters::upper, "title": filters::title, "capitalize": filters::capitalize,
        "replace": filters::replace, "length": filters::length, "count": filters::length,
        "dictsort": filters::dictsort, "items": filters::items, "reverse": filters::reverse, "trim": filters::trim,
        "join": filters::join, "split": filters::split, "lines": filters::lines, "default": filters::default,
        "d": filters::default, "round": filters::round, "abs": filters::abs, "int": filters::int,
        "float": filters::float, "attr": filters::attr, "first": filters::first, "last": filters::last,
        "min": filters::min, "max": filters::max, "sort": filters::sort, "list": filters::list,
        "string": filters::string, "bool": filters::bool, "batch": filters::batch, "slice": filters::slice,
        "sum": filters::sum, "indent": filters::indent, "select": filters::select, "reject": filters::reject,
        "selectattr": filters::selectattr, "rejectattr": filters::rejectattr, "map": filters::map,
        "groupby": filters::groupby, "unique": filters::unique, "chain": filters::chain, "zip": filters::zip,
        "pprint": filters::pprint, "format": filters::format,
    }
    macro_rules! tests {
        ($($name:literal: $test:expr,)*) => {
            $(add_test(&mut environment, $name, Value::from_function($test));)*
        };
    }
    tests! {
        "undefined": tests::is_undefined, "defined": tests::is_defined, "none": tests::is_none,
        "safe": tests::is_safe, "escaped": tests::is_safe, "boolean": tests::is_boolean, "odd": tests::is_odd,
        "even": tests::is_even, "divisibleby": tests::is_divisibleby, "number": tests::is_number,
        "integer": tests::is_integer, "int": tests::is_integer, "float": tests::is_float, "string": tests::is_string,
        "iterable": tests::is_iterable, "mapping": tests::is_mapping, "startingwith": tests::is_startingwith,
        "endingwith": tests::is_endingwith, "lower": tests::is_lower, "upper": tests::is_upper,
        "sameas": tests::is_sameas, "eq": tests::is_eq, "equalto": tests::is_eq, "==": tests::is_eq,
        "ne": tests::is_ne, "!=": tests::is_ne, "lt": tests::is_lt, "lessthan": tests::is_lt, "<": tests::is_lt,
        "le": tests::is_le, "<=": tests::is_le, "gt": tests::is_gt, "greaterthan": tests::is_gt, ">": tests::is_gt,
        "ge": tests::is_ge, ">=": tests::is_ge, "in": tests::is_in, "true": tests::is_true, "false": tests::is_false,
        "filter": tests::is_filter, "test": tests::is_test,
    }
    // In Python whatever has a length and an index is a sequence.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    environment.add_function("range", functions::range);
    add_function(&mut environment, "dict", Value::from_function(functions::dict));
    add_function(&mut environment, "namespace", Value::from_function(functions::namespace));
    environment
}

/// Adds a filter that pays.
pub(super) fn add_filter(environment: &mut Environment<'static>, name: &'static str, filter: Value) {
    environment.add_filter(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        pay_for(name, &arguments)?;
        let made = settle(filter.call(state, &arguments)?)?;
        if deepens(name) { built(made) } else { Ok(made) }
    });
}

fn add_test(environment: &mut Environment<'static>, name: &'static str, test: Value) {
    let by_kind =
        ["undefined", "defined", "none", "string", "mapping", "iterable", "number", "boolean"].contains(&name);
    environment.add_test(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        if !by_kind {
            pay(look_at_all(&arguments)?)?;
        }
        Ok::<bool, Error>(test.call(state, &arguments)?.is_true())
    });
}

/// Adds a function that pays for a look at its arguments and at what it gives.
pub(super) fn add_function(environment: &mut Environment<'static>, name: &'static str, function: Value) {
    environment.add_function(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        pay(look_at_all(&arguments)?)?;
        built(function.call(state, &arguments)?)
    });
}

/// The syntax of transformers' templates.
pub(super) static SYNTAX: LazyLock<SyntaxConfig> = LazyLock::new(|| {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the usual delimiters")
});
