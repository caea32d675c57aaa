//! A reader of Rust sources, precise enough for code that compiles and is formatted by rustfmt.

use std::collections::HashSet;

/// An identifier, `::`, `->`, `=>` or one other character. A literal is one `"` per line.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) text: String,
    pub(super) line: usize,
    /// A line of a literal, with its quotes; empty for other tokens.
    pub(super) literal: String,
}

/// A function, method or associated function.
#[derive(Debug, PartialEq)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) line: usize,
    /// Lines of the body with code on them: neither the braces nor blank lines nor comments count.
    pub(super) code_lines: usize,
    /// Parameters besides `self`.
    pub(super) params: usize,
}

/// A path in the code, as written: `crate::data::Dataset`.
#[derive(Debug, PartialEq)]
pub(super) struct CodePath {
    pub(super) segments: Vec<String>,
    pub(super) line: usize,
    /// The name that a `use` declaration binds; `*` for a glob, `None` for a path outside of `use`.
    pub(super) binds: Option<String>,
    /// Declared by `pub use`, `pub(crate) use` or the like.
    pub(super) reexport: bool,
}

/// The tokens of code outside tests, and the modules declared there.
pub(super) struct Code {
    pub(super) tokens: Vec<Token>,
    /// Names in `mod name;`, without those under `#[cfg(test)]`.
    pub(super) modules: Vec<String>,
}

impl Code {
    pub(super) fn read(source: &str) -> Self {
        let tokens = without_tests(&tokens(source));
        let declared = |at: &[Token]| at[0].text == "mod" && at[2].text == ";";
        let modules = tokens.windows(3).filter(|at| declared(at)).map(|at| at[1].text.clone()).collect();
        Self { tokens, modules }
    }

    /// Every path of two or more segments, and every leaf of a `use` declaration.
    pub(super) fn paths(&self) -> Vec<CodePath> {
        let text = |i: usize| self.tokens.get(i).map_or("", |token| token.text.as_str());
        let (mut paths, mut i) = (Vec::new(), 0);
        while i < self.tokens.len() {
            if text(i) == "use" && !(i > 0 && text(i - 1) == "+") {
                // `pub(crate) use` ends with a parenthesis.
                let reexport = i > 0 && (text(i - 1) == "pub" || text(i - 1) == ")");
                i = self.use_tree(i + 1, &[], reexport, &mut paths);
            } else if is_identifier(text(i)) && text(i + 1) == "::" && (i == 0 || text(i - 1) != "::") {
                let (line, mut segments) = (self.tokens[i].line, vec![text(i).to_string()]);
                while text(i + 1) == "::" && is_identifier(text(i + 2)) {
                    i += 2;
                    segments.push(text(i).to_string());
                }
                paths.push(CodePath { segments, line, binds: None, reexport: false });
            }
            i += 1;
        }
        paths
    }

    /// Adds the leaves of the use tree at token `i`; returns the index of the token after it.
    fn use_tree(&self, mut i: usize, prefix: &[String], reexport: bool, paths: &mut Vec<CodePath>) -> usize {
        let mut segments = prefix.to_vec();
        loop {
            let token = &self.tokens[i];
            i += 1;
            match token.text.as_str() {
                "::" => {}
                "{" => {
                    while self.tokens[i].text != "}" {
                        i = self.use_tree(i, &segments, reexport, paths);
                        i += usize::from(self.tokens[i].text == ",");
                    }
                    return i + 1;
                }
                name => {
                    segments.push(name.to_string());
                    if self.tokens[i].text == "::" {
                        continue;
                    }
                    let mut binds = name.to_string();
                    if self.tokens[i].text == "as" {
                        binds.clone_from(&self.tokens[i + 1].text);
                        i += 2;
                    }
                    match name {
                        // `use a::{self}` binds `a`; a glob depends on the module itself.
                        "self" => {
                            segments.pop();
                            binds = segments.last().cloned().unwrap_or_default();
                        }
                        "*" => drop(segments.pop()),
                        _ => {}
                    }
                    paths.push(CodePath { segments, line: token.line, binds: Some(binds), reexport });
                    return i;
                }
            }
        }
    }

    /// Names that occur outside of `use` declarations.
    pub(super) fn names_in_use(&self) -> HashSet<&str> {
        let (mut names, mut in_use) = (HashSet::new(), false);
        for token in &self.tokens {
            in_use = token.text == "use" || in_use && token.text != ";";
            if !in_use {
                names.insert(token.text.as_str());
            }
        }
        names
    }

    /// Every struct with named fields: its name, and their number.
    pub(super) fn structs(&self) -> Vec<(String, usize)> {
        let tokens = &self.tokens;
        let starts = (0..tokens.len()).filter(|&i| tokens[i].text == "struct" && is_identifier(&tokens[i + 1].text));
        let found = starts.filter_map(|i| {
            let open = i + tokens[i..].iter().position(|token| ["{", "(", ";"].contains(&token.text.as_str()))?;
            let named = tokens[open].text == "{";
            named.then(|| (tokens[i + 1].text.clone(), fields(tokens, open, closing(tokens, open))))
        });
        found.collect()
    }

    /// Every function with a name, but for the declarations in `extern` blocks.
    pub(super) fn functions(&self) -> Vec<Function> {
        let (tokens, mut functions, mut i) = (&self.tokens, Vec::new(), 0);
        while i + 1 < tokens.len() {
            if tokens[i].text == "extern" && tokens[i + 1].text == "\"" && tokens[i + 2].text == "{" {
                i = closing(tokens, i + 2);
            } else if tokens[i].text == "fn" && is_identifier(&tokens[i + 1].text) {
                let (params, after) = parameters(tokens, i + 2);
                let body = after + tokens[after..].iter().position(|t| t.text == "{" || t.text == ";").unwrap();
                let code_lines =
                    if tokens[body].text == "{" { lines_between(tokens, body, closing(tokens, body)) } else { 0 };
                functions.push(Function { name: tokens[i + 1].text.clone(), line: tokens[i].line, code_lines, params });
                i += 1;
            }
            i += 1;
        }
        functions
    }
}

/// Number of fields in the body of a struct, which is in the braces at `open` and `close`.
fn fields(tokens: &[Token], open: usize, close: usize) -> usize {
    let (mut depth, mut count) = (0, 0);
    for token in &tokens[open + 1..close] {
        match token.text.as_str() {
            "(" | "[" | "{" | "<" => depth += 1,
            ")" | "]" | "}" | ">" => depth -= 1,
            ":" if depth == 0 => count += 1,
            _ => {}
        }
    }
    count
}

/// Comment blocks, documentation or not: the line where each starts, and its text.
pub(super) fn comments(source: &str) -> Vec<(usize, String)> {
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut previous = "";
    for (number, line) in (1..).zip(source.lines()) {
        let line = line.trim_start();
        let marker = ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker)).unwrap_or("");
        if !marker.is_empty() {
            let text = line[marker.len()..].trim();
            match blocks.last_mut() {
                Some((_, block)) if marker == previous => {
                    block.push(' ');
                    block.push_str(text);
                }
                _ => blocks.push((number, text.to_string())),
            }
        }
        previous = marker;
    }
    blocks
}

fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

fn tokens(source: &str) -> Vec<Token> {
    let (mut tokens, mut rest, mut line): (Vec<Token>, _, _) = (Vec::new(), source, 1);
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let literal = literal_length(rest);
        let (length, text) = if first == '\n' {
            line += 1;
            (1, None)
        } else if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), None)
        } else if literal > 0 {
            for part in rest[..literal].split('\n') {
                tokens.extend((!part.is_empty()).then(|| Token { text: "\"".into(), line, literal: part.into() }));
                line += 1;
            }
            line -= 1;
            (literal, None)
        } else if word > 0 {
            (word, Some(&rest[..word]))
        } else if ["::", "->", "=>"].iter().any(|both| rest.starts_with(both)) {
            (2, Some(&rest[..2]))
        } else {
            let length = first.len_utf8();
            (length, (!first.is_whitespace()).then_some(&rest[..length]))
        };
        tokens.extend(text.map(|text| Token { text: text.into(), line, literal: String::new() }));
        rest = &rest[length..];
    }
    tokens
}

/// Bytes of the string, character or byte literal that `rest` starts with; 0 if none.
fn literal_length(rest: &str) -> usize {
    let prefixed = rest.strip_prefix(['b', 'c']).unwrap_or(rest);
    let raw = prefixed.strip_prefix('r').unwrap_or("");
    let hashes = raw.len() - raw.trim_start_matches('#').len();
    let prefix = rest.len() - prefixed.len();
    if raw[hashes..].starts_with('"') {
        let end = format!("\"{}", "#".repeat(hashes));
        let body = prefix + 1 + hashes + 1;
        return body + rest[body..].find(&end).expect("a raw string ends") + end.len();
    }
    let mut chars = prefixed.char_indices();
    match chars.next() {
        Some((_, '"')) => {}
        // A lifetime has no closing quote.
        Some((_, '\'')) if prefixed[1..].starts_with('\\') || prefixed.chars().nth(2) == Some('\'') => {}
        _ => return 0,
    }
    let quote = prefixed.as_bytes()[0] as char;
    while let Some((i, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            c if c == quote => return prefix + i + 1,
            _ => {}
        }
    }
    panic!("a literal without an end: {}", &rest[..rest.len().min(40)]);
}

/// Leaves out items under `#[test]` and `#[cfg(test)]`.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let (mut kept, mut i) = (Vec::new(), 0);
    while i < tokens.len() {
        let attribute = tokens[i].text == "#" && tokens.get(i + 1).is_some_and(|next| next.text == "[");
        if !attribute {
            kept.push(tokens[i].clone());
            i += 1;
            continue;
        }
        let end = closing(tokens, i + 1);
        let words: Vec<&str> = tokens[i + 2..end].iter().map(|token| token.text.as_str()).collect();
        let test = words == ["test"]
            || words[0] == "cfg" && !words.contains(&"not") && (words.contains(&"test") || words.contains(&"doctest"));
        if test {
            i = item_end(tokens, end + 1);
        } else {
            kept.extend_from_slice(&tokens[i..=end]);
            i = end + 1;
        }
    }
    kept
}

/// The index after the item that starts at `i`: after its `;`, or after its body in braces.
fn item_end(tokens: &[Token], mut i: usize) -> usize {
    let mut head = tokens[i..].iter().take_while(|token| token.text != ";" && token.text != "{");
    let is_use = head.any(|token| token.text == "use");
    loop {
        match tokens[i].text.as_str() {
            ";" => return i + 1,
            "{" if !is_use => return closing(tokens, i) + 1,
            "(" | "[" | "{" => i = closing(tokens, i) + 1,
            _ => i += 1,
        }
    }
}

/// The index of the bracket that closes the one at `i`.
fn closing(tokens: &[Token], i: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(i) {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("no closing bracket for line {}", tokens[i].line);
}

/// Counts the parameters of the function whose generics or parenthesis is at `i`, and returns the index after them.
fn parameters(tokens: &[Token], mut i: usize) -> (usize, usize) {
    let mut angles = 0;
    while angles > 0 || tokens[i].text != "(" {
        match tokens[i].text.as_str() {
            "<" => angles += 1,
            ">" => angles -= 1,
            _ => {}
        }
        i += 1;
    }
    let end = closing(tokens, i);
    let (mut depth, mut count, mut filled, mut has_self) = (0, 0, false, false);
    for token in &tokens[i + 1..end] {
        match token.text.as_str() {
            "(" | "[" | "{" | "<" => depth += 1,
            ")" | "]" | "}" | ">" => depth -= 1,
            "," if depth == 0 => {
                count += usize::from(filled);
                filled = false;
                continue;
            }
            "self" if depth == 0 => has_self = true,
            _ => {}
        }
        filled = true;
    }
    (count + usize::from(filled) - usize::from(has_self), end + 1)
}

/// Lines with code between the braces at `open` and `close`, other than the lines of the braces.
fn lines_between(tokens: &[Token], open: usize, close: usize) -> usize {
    let lines: HashSet<usize> = tokens[open..close].iter().map(|token| token.line).collect();
    lines.into_iter().filter(|line| (tokens[open].line + 1..tokens[close].line).contains(line)).count()
}
