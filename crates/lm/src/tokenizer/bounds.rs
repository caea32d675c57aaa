//! Resource limits of chat templates. Templates come with models, so they are untrusted code: each operator, filter, test,
//! function and method pays for the text and the values that it makes or reads out of one budget, before it runs, and the
//! template runs on a separate thread with a large stack.
//!
//! The engine limits only the number of its steps, and one step may double a string. So the compiled instructions are
//! rewritten: an instruction that can make or read something large is preceded by a filter that pays for it.

use super::python::{self, shown, shown_items};
use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use minijinja::{filters, functions, tests};
use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Maximum bytes of a source, several times any real one.
const MAX_SOURCE: usize = 256 << 10;

/// Maximum tokens of one block of a source, which bounds how deep its expressions nest.
const MAX_TOKENS: usize = 2000;

/// Maximum bytes to which the constants of one block can be multiplied.
const MAX_CONSTANT: u128 = 1 << 20;

/// Maximum nesting depth of values.
const MAX_DEPTH: usize = 100;

/// Bytes of text and values that one rendering may make or read, plus [`PER_BYTE`] for each byte of its messages.
const BUDGET: u64 = 256 << 20;

/// Additional bytes that a rendering may make or read per byte of its messages.
const PER_BYTE: u64 = 16;

/// Maximum bytes to which the constants of all blocks can be multiplied.
const MAX_CONSTANTS: u128 = 16 << 20;

/// Cost of one value in addition to its text: the value itself, twice, as lists grow by doubling.
const NODE: u64 = 64;

/// Upper bound on the bytes of the text of a number or a constant.
const LEAF: u64 = 64;

/// Cost of a macro, and of each name that it takes from around it: the engine keeps them until the rendering ends.
const KEPT: u64 = 512;

/// Stack bytes of the thread that compiles or renders; only the used part takes memory.
const STACK: usize = 256 << 20;

thread_local! {
    /// Remaining budget of the rendering on this thread.
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// A compiled template with its payments.
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

    /// Renders the template with `environment`, which must come from [`environment`]; `context` has `input` bytes of text.
    /// First calls `begin` on the thread that renders.
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

/// Returns the source with a static lifetime, which the engine's instructions need; equal sources are leaked once.
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

/// Runs `run` on a thread whose stack is large enough for deep recursion; a panic becomes an error.
fn on_a_deep_stack<T: Send>(run: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().name("chat template".into()).stack_size(STACK).spawn_scoped(scope, run);
        let thread = thread.map_err(|e| failed(format!("cannot start a thread to render it: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("the template engine failed on it".into())))
    })
}

/// Checks each block of a source before it is parsed: the parser and the compiler recurse over its tokens, and the
/// compiler evaluates constants.
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
    // Bytes of the multiplied constants in this block, and in the blocks before it.
    let (mut current, mut earlier) = (0u128, 0u128);
    for token in tokenize(source, false, syntax.clone()) {
        // The parser reports what is not a token.
        let Ok((token, span)) = token else { return Ok(()) };
        block.tokens += 1;
        match token {
            Token::VariableStart | Token::BlockStart => {
                earlier = earlier.saturating_add(current);
                block = Block { repeats: 1, ..Block::default() };
            }
            Token::Str(text) => block.bytes += text.len() as u128,
            Token::String(text) => block.bytes += text.len() as u128,
            Token::BracketOpen | Token::Comma => block.bytes += u128::from(NODE / 2),
            Token::Int(number) => block.repeats = block.repeats.saturating_mul(u128::from(number) + 1),
            Token::Int128(_) => block.repeats = u128::MAX,
            Token::Mul => block.multiplies = true,
            Token::Pow => block.raises = true,
            _ => {}
        }
        let repeats = if block.raises { u128::MAX } else { block.repeats };
        current = if block.multiplies { block.bytes.saturating_mul(repeats) } else { 0 };
        let wrong = if block.tokens > MAX_TOKENS {
            format!("expected at most {MAX_TOKENS} tokens in one block")
        } else if current > MAX_CONSTANT {
            format!("expected constants that multiply to at most {MAX_CONSTANT} bytes")
        } else if earlier.saturating_add(current) > MAX_CONSTANTS {
            format!("expected constants that multiply to at most {MAX_CONSTANTS} bytes in all blocks")
        } else {
            continue;
        };
        let message = format!("{wrong}, found more in line {}", span.start_line);
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(())
}

/// Names of the filters that pay; no source can contain these names.
const BEFORE: &str = "@before";
const AFTER: &str = "@after";
const BUILT: &str = "@built";

/// Marks a filter that is not in the engine's cache.
const UNCACHED: u8 = !0;

type Code = Vec<Instruction<'static>>;

fn apply(filter: &'static str, count: u16) -> Instruction<'static> {
    Instruction::ApplyFilter(filter, Some(count), UNCACHED)
}

/// `instruction` after a payment for `operation` on its `count` operands, and, if `checked`, before a check of its result.
fn paid(operation: &'static str, count: u16, instruction: &Instruction<'static>, checked: bool) -> Code {
    let mut code = vec![Instruction::LoadConst(Value::from(operation)), apply(BEFORE, count + 1)];
    if count > 1 {
        code.push(Instruction::UnpackList(usize::from(count)));
    }
    code.push(instruction.clone());
    code.extend(checked.then(|| apply(AFTER, 1)));
    code
}

/// `instruction` with a payment if it may cost more than a step.
fn with_payment(instruction: &Instruction<'static>) -> Code {
    match instruction {
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::LoadConst(value) if value.kind() == ValueKind::Iterable => {
            vec![instruction.clone(), apply(AFTER, 1)]
        }
        Instruction::Add => paid("+", 2, instruction, true),
        Instruction::Mul => paid("*", 2, instruction, true),
        Instruction::StringConcat => paid("~", 2, instruction, false),
        Instruction::Eq
        | Instruction::Ne
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::In
        | Instruction::CompareAndPreserve(_) => paid("compare", 2, instruction, false),
        Instruction::GetItem => paid("item", 2, instruction, false),
        Instruction::Slice => paid("slice", 4, instruction, true),
        Instruction::SetAttr(_) => paid("set", 2, instruction, false),
        Instruction::PushLoop(_) | Instruction::FastRecurse => paid("loop", 1, instruction, false),
        Instruction::UnpackList(_) => paid("take", 1, instruction, false),
        Instruction::MergeKwargs(count) | Instruction::UnpackLists(count) if *count < usize::from(u16::MAX) => {
            paid("take", *count as u16, instruction, false)
        }
        Instruction::CallMethod(_, Some(count)) => paid("call", *count, instruction, false),
        Instruction::CallFunction(_, Some(count)) | Instruction::CallObject(Some(count)) if *count > 0 => {
            paid("loop", *count, instruction, false)
        }
        // Its operand is the list of its arguments' names.
        Instruction::BuildMacro(..) => paid("macro", 1, instruction, false),
        Instruction::Enclose(_) => vec![
            Instruction::LoadConst(Value::from("enclose")),
            apply(BEFORE, 1),
            Instruction::DiscardTop,
            instruction.clone(),
        ],
        Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::BuildMap(_) => {
            vec![instruction.clone(), apply(BUILT, 1)]
        }
        other => vec![other.clone()],
    }
}

/// `code` with a payment before each instruction that may cost more than a step.
fn paying(code: &Instructions<'static>) -> Instructions<'static> {
    let mut parts: Vec<(u32, Code)> = Vec::new();
    while let Some(instruction) = code.get(parts.len() as u32) {
        parts.push((parts.len() as u32, with_payment(instruction)));
    }
    // The new index of each instruction, and the end.
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

/// Pays for reading all of `value`; returns an upper bound on the bytes of its text.
fn read(value: &Value, depth: usize) -> Result<u64, Error> {
    pay(NODE)?;
    if let Some(text) = value.as_str() {
        let len = text.len() as u64;
        // Within other values it is quoted and escaped.
        return Ok(if depth == 0 { len } else { 6 * len + 2 });
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(LEAF);
    }
    if depth == MAX_DEPTH {
        return Err(too_much(format!("expected values at most {MAX_DEPTH} deep in each other, found deeper ones")));
    }
    let mut text = NODE;
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            text = text.saturating_add(read(&value.get_item(&item)?, depth + 1)?);
        }
        text = text.saturating_add(read(&item, depth + 1)?);
    }
    Ok(text)
}

fn read_all(values: &[Value]) -> Result<u64, Error> {
    values.iter().try_fold(0, |sum: u64, value| Ok(sum.saturating_add(read(value, 0)?)))
}

/// Cost of a copy of `value` without its elements; of a lazy sequence, of the list that it becomes.
fn size(value: &Value) -> u64 {
    let lazy = || match value.kind() {
        ValueKind::Iterable => value.try_iter().map_or(0, Iterator::count),
        _ => 0,
    };
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => NODE.saturating_mul(value.len().unwrap_or_else(lazy) as u64),
    }
}

/// Cost of a list of the elements of `value`, or of the characters of a text.
fn elements(value: &Value) -> u64 {
    value.as_str().map_or_else(|| size(value), |text| NODE.saturating_mul(text.len() as u64))
}

fn sizes(values: &[Value]) -> u64 {
    values.iter().map(size).fold(NODE, u64::saturating_add)
}

/// Whether `value` is or contains a namespace: a namespace that contained itself would never be freed.
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

/// Pays for an operation on `operands`, the last of which is its name; returns the others in reverse order.
fn before(operands: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let operands = operands.into_values();
    let Some((operation, operands)) = operands.split_last() else { return Ok(Value::UNDEFINED) };
    let repeated = |what: &Value, times: &Value| size(what).saturating_mul(times.as_i64().map_or(1, i64::unsigned_abs));
    match (operation.as_str().unwrap_or_default(), operands) {
        ("+" | "take" | "slice", operands) => pay(sizes(operands))?,
        // Elements are taken one by one, and those of a lazy sequence are made one by one.
        ("loop", operands) => {
            let lens = operands.iter().map(|value| value.len().unwrap_or(0) as u64);
            pay(NODE.saturating_mul(lens.fold(1, u64::saturating_add)))?;
        }
        ("macro", operands) => pay(KEPT.saturating_add(sizes(operands)))?,
        ("enclose", _) => pay(KEPT)?,
        ("*", [a, b]) => pay(repeated(a, b).max(repeated(b, a)).saturating_add(NODE))?,
        ("~" | "compare", operands) => pay(read_all(operands)?)?,
        ("item", [base, key]) => {
            let key = read(key, 0)?;
            pay(key.saturating_add(base.as_str().map_or(0, |text| text.len() as u64)))?;
        }
        ("set", [value, _]) => {
            pay(read(value, 0)?.min(NODE))?;
            if holds_namespace(value) {
                return Err(too_much("expected a namespace to hold plain values, found a namespace in it".into()));
            }
        }
        ("call", [_, arguments @ ..]) => pay(read_all(arguments)?)?,
        _ => {}
    }
    let is_text = operation.as_str() == Some("~");
    Ok(match operands {
        [one] => one.clone(),
        several if is_text => several.iter().rev().map(shown).collect::<Vec<Value>>().into(),
        several => several.iter().rev().cloned().collect::<Vec<Value>>().into(),
    })
}

/// Evaluates a lazy sequence to a list: lazy sequences could nest without limit.
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

/// Pays for the result of a filter or method without its elements, and settles it.
fn made(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Iterable => settle(value),
        _ => pay(size(&value)).map(|()| value),
    }
}

/// Pays for a new value and checks its depth.
fn built(value: Value) -> Result<Value, Error> {
    let value = settle(value)?;
    read(&value, 0)?;
    Ok(value)
}

/// Sum of all integers among `arguments`, keyword arguments included.
fn numbers(arguments: &[Value]) -> u64 {
    let number = |value: &Value| value.as_i64().map_or(0, i64::unsigned_abs);
    let named = |value: &Value| {
        let kwargs = Kwargs::try_from(value.clone()).ok()?;
        Some(kwargs.args().map(|name| kwargs.peek::<Value>(name).map_or(0, |value| number(&value))).sum::<u64>())
    };
    arguments.iter().map(|value| number(value).saturating_add(named(value).unwrap_or(0))).fold(0, u64::saturating_add)
}

/// Whether a field of a format takes its width from another, as `{:>{}}` does.
fn nests_fields(format: &str) -> bool {
    let mut inside = false;
    let mut letters = format.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '{' if inside => return true,
            '{' => inside = letters.next_if_eq(&'{').is_none(),
            '}' => inside = false,
            _ => {}
        }
    }
    false
}

/// Sum of the widths and precisions of a format with `holes` fields.
fn widths(format: &Value, arguments: &[Value], holes: u64) -> u64 {
    let text = format.as_str().unwrap_or_default();
    let written = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let written = written.map(|digits| digits.parse::<u64>().unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    // `*`, and `{}` within braces, take them from the arguments, each field perhaps from the same.
    let takes = text.contains('*') || nests_fields(text);
    let taken = if takes { numbers(arguments).saturating_mul(holes) } else { 0 };
    // A character of up to four bytes fills the width.
    written.saturating_add(taken).saturating_mul(4)
}

/// Pays for applying the filter or method `name` to `arguments`, the first of which is its subject.
fn pay_for(name: &str, arguments: &[Value]) -> Result<(), Error> {
    let Some((subject, others)) = arguments.split_first() else { return Ok(()) };
    match name {
        "default" | "d" | "length" | "count" | "first" | "last" | "attr" | "int" | "float" | "abs" | "round"
        | "bool" | "get" | "reverse" | "items" | "keys" | "values" | "find" | "rfind" | "startswith" | "endswith"
        | "strip" | "lstrip" | "rstrip" | "trim" => return pay(sizes(arguments)),
        "list" | "select" | "reject" | "selectattr" | "rejectattr" | "map" | "chain" | "zip" => {
            return pay(arguments.iter().map(elements).fold(NODE, u64::saturating_add));
        }
        _ => {}
    }
    let text = read_all(arguments)?;
    let text_bytes = |value: &Value| read(value, 0);
    let count = |value: &Value| value.as_str().map_or(value.len().unwrap_or(0), str::len) as u64;
    let cost = match name {
        "batch" | "slice" => {
            numbers(others).saturating_mul(2 * NODE).saturating_add(elements(subject).saturating_mul(2))
        }
        "indent" => {
            let lines = subject.to_string().matches('\n').count() as u64 + 1;
            lines.saturating_mul(numbers(others).max(4) + others.iter().map(count).sum::<u64>()).saturating_add(text)
        }
        "replace" => {
            let [old, new] = [others.first(), others.get(1)].map(|value| value.map_or(String::new(), Value::to_string));
            let subject = text_bytes(subject)?;
            (subject / (old.len() as u64).max(1) + 1).saturating_mul(new.len() as u64).saturating_add(text)
        }
        // Either may be the separator: `join` is a filter of a list and a method of a string.
        "join" => {
            let between =
                |list: &Value, separator: &Value| Ok::<_, Error>(count(list).saturating_mul(text_bytes(separator)?));
            let separator = others.first().cloned().unwrap_or_default();
            between(subject, &separator)?.max(between(&separator, subject)?).saturating_add(text)
        }
        "format" => {
            let holes = subject.as_str().map_or(0, |text| text.matches(['%', '{']).count() as u64);
            widths(subject, others, holes).saturating_add(text.saturating_mul(holes + 1))
        }
        "sort" | "dictsort" | "unique" | "groupby" | "min" | "max" | "sum" => {
            text.saturating_mul(16).saturating_add(elements(subject).saturating_mul(2))
        }
        "split" | "rsplit" | "lines" | "splitlines" => text.saturating_mul(NODE),
        // A character of up to four bytes fills the width.
        "ljust" | "rjust" | "zfill" => numbers(others).saturating_mul(4).saturating_add(text),
        // Letters and escapes may take more bytes than the original.
        _ => text.saturating_mul(6),
    };
    pay(cost)
}

/// Whether the result of a filter may be nested one level deeper than its input.
fn deepens(name: &str) -> bool {
    ["batch", "slice", "groupby", "zip", "items", "dictsort", "map"].contains(&name)
}

/// Creates an environment whose filters, tests, functions and methods all pay; the caller extends it with [`add_filter`] and
/// [`add_function`].
pub(super) fn environment(syntax: &SyntaxConfig, steps: u64) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_syntax(syntax.clone());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(steps));
    environment.set_formatter(|out, state, value| {
        let text = read(value, 0)?;
        let escaped = !matches!(state.auto_escape(), AutoEscape::None);
        pay(if escaped { text.saturating_mul(6) } else { text })?;
        minijinja::escape_formatter(out, state, &shown(value))
    });
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
        pay_for(method, &all)?;
        made(python::method(state, value, method, arguments)?)
    });
    environment.add_filter(BEFORE, before);
    environment.add_filter(AFTER, settle);
    environment.add_filter(BUILT, built);
    add_filters(&mut environment);
    add_tests(&mut environment);
    environment.add_function("range", functions::range);
    add_function(&mut environment, "dict", Value::from_function(functions::dict));
    add_function(&mut environment, "namespace", Value::from_function(functions::namespace));
    environment
}

/// Adds Jinja's filters.
fn add_filters(environment: &mut Environment<'static>) {
    macro_rules! filters {
        ($($name:literal: $filter:expr,)*) => {
            $(add_filter(environment, $name, Value::from_function($filter));)*
        };
    }
    filters! {
        "safe": filters::safe, "escape": filters::escape, "e": filters::escape, "lower": filters::lower,
        "upper": filters::upper, "title": filters::title, "capitalize": filters::capitalize,
        "replace": filters::replace, "length": filters::length, "count": filters::length,
        "dictsort": filters::dictsort, "items": filters::items, "reverse": filters::reverse, "trim": filters::trim,
        "join": filters::join, "split": filters::split, "lines": filters::lines, "default": filters::default,
        "d": filters::default, "round": filters::round, "abs": filters::abs, "int": int,
        "float": float, "attr": filters::attr, "first": filters::first, "last": filters::last,
        "min": filters::min, "max": filters::max, "sort": filters::sort, "list": filters::list,
        "string": string, "bool": filters::bool, "batch": filters::batch, "slice": filters::slice,
        "sum": filters::sum, "indent": filters::indent, "select": filters::select, "reject": filters::reject,
        "selectattr": filters::selectattr, "rejectattr": filters::rejectattr, "map": filters::map,
        "groupby": filters::groupby, "unique": filters::unique, "chain": filters::chain, "zip": filters::zip,
        "pprint": filters::pprint, "format": filters::format,
    }
}

/// Jinja's filter `int`: 0, or the default, for a value that is no number.
fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    filters::int(state, value, default, base, named).or_else(|error| zero(error, 0.into()))
}

/// Jinja's filter `float`: 0.0, or the default, for a value that is no number.
fn float(state: &State<'_, '_>, value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    filters::float(state, value, default, named).or_else(|error| zero(error, 0.0.into()))
}

/// `number` in place of the error of a value that cannot be converted.
fn zero(error: Error, number: Value) -> Result<Value, Error> {
    if error.kind() == ErrorKind::InvalidOperation { Ok(number) } else { Err(error) }
}

/// Jinja's filter `string`.
fn string(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    filters::string(state, &shown(value))
}

/// Adds Jinja's tests.
fn add_tests(environment: &mut Environment<'static>) {
    macro_rules! tests {
        ($($name:literal: $test:expr,)*) => {
            $(add_test(environment, $name, Value::from_function($test));)*
        };
    }
    tests! {
        "undefined": tests::is_undefined, "defined": tests::is_defined, "none": tests::is_none,
        "safe": tests::is_safe, "escaped": tests::is_safe, "boolean": tests::is_boolean, "odd": tests::is_odd,
        "even": tests::is_even, "divisibleby": tests::is_divisibleby, "number": tests::is_number,
        "integer": tests::is_integer, "int": tests::is_integer, "float": tests::is_float, "string": tests::is_string,
        "mapping": tests::is_mapping, "startingwith": tests::is_startingwith, "endingwith": tests::is_endingwith,
        "lower": tests::is_lower, "upper": tests::is_upper, "sameas": tests::is_sameas, "eq": tests::is_eq,
        "equalto": tests::is_eq, "==": tests::is_eq, "ne": tests::is_ne, "!=": tests::is_ne, "lt": tests::is_lt,
        "lessthan": tests::is_lt, "<": tests::is_lt,
        "le": tests::is_le, "<=": tests::is_le, "gt": tests::is_gt, "greaterthan": tests::is_gt, ">": tests::is_gt,
        "ge": tests::is_ge, ">=": tests::is_ge, "in": tests::is_in, "true": tests::is_true, "false": tests::is_false,
        "filter": tests::is_filter, "test": tests::is_test,
    }
    // In Python, none cannot be iterated over; Jinja's undefined can.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    // In Python, everything with a length and an index is a sequence.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
}

/// Adds a filter that pays.
pub(super) fn add_filter(environment: &mut Environment<'static>, name: &'static str, filter: Value) {
    environment.add_filter(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
        let mut arguments = arguments.into_values().into_iter().map(settle).collect::<Result<Vec<Value>, Error>>()?;
        pay_for(name, &arguments)?;
        if let ("join", Some(list)) = (name, arguments.first_mut()) {
            *list = shown_items(list)?;
        }
        let made = made(filter.call(state, &arguments)?)?;
        if deepens(name) { built(made) } else { Ok(made) }
    });
}

fn add_test(environment: &mut Environment<'static>, name: &'static str, test: Value) {
    let by_kind = ["undefined", "defined", "none", "string", "mapping", "number", "boolean"].contains(&name);
    environment.add_test(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        if !by_kind {
            pay(read_all(&arguments)?)?;
        }
        Ok::<bool, Error>(test.call(state, &arguments)?.is_true())
    });
}

/// Adds a function that pays for reading its arguments and its result.
pub(super) fn add_function(environment: &mut Environment<'static>, name: &'static str, function: Value) {
    environment.add_function(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        pay(read_all(&arguments)?)?;
        built(function.call(state, &arguments)?)
    });
}

/// The syntax of transformers' templates.
pub(super) static SYNTAX: LazyLock<SyntaxConfig> = LazyLock::new(|| {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the usual delimiters")
});
