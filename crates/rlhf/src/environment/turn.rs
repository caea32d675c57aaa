//! The tool calls of a turn: the calls to make, and the results of calls that fail before they are made.

use super::{EnvironmentConfig, MalformedCalls, ToolCall, ToolResult};
use rlhf_base::rng::{Purpose, Stream};
use rlhf_lm::tokenizer::Turn;
use serde_json::{Value, json};

/// Returns the seed of a group's sessions, from the run's seed, the step and the group's number in the step.
pub fn session_seed(seed: u64, step: u64, group: u64) -> u64 {
    let mut stream = Stream::new(seed, Purpose::Environments, step, group);
    (stream.uniform() * f64::from(u32::MAX)) as u64
}

impl EnvironmentConfig {
    /// Returns whether a turn has results: those of its calls, or the error of a call that cannot be read.
    pub fn has_results(&self, turn: &Turn) -> bool {
        !turn.calls.is_empty() || turn.malformed.is_some() && self.malformed_calls == MalformedCalls::Error
    }
}

/// The results of a turn's calls, in their order; `None` for calls that are still to be made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Results(Vec<Option<ToolResult>>);

impl Results {
    /// Returns the results that are known already, and the calls to make. A call fails at once if its arguments are no object or if the
    /// turn cannot be read.
    pub fn of(turn: Turn) -> (Self, Vec<ToolCall>) {
        let fails = |name: &str, fault: &str| ToolResult::failed(name, error_text(fault));
        let known = match &turn.malformed {
            Some(fault) => vec![Some(fails("", fault))],
            None => turn.calls.iter().map(|call| Some(fails(&call.name, call.fault.as_ref()?))).collect(),
        };
        let made = turn.calls.into_iter().filter(|call| call.fault.is_none());
        (Self(known), made.map(|call| ToolCall { name: call.name, arguments: call.arguments }).collect())
    }

    /// Fills in the results of the calls that were `made`. An episode that is over may leave out the last ones.
    pub fn with(self, made: Vec<ToolResult>) -> Vec<ToolResult> {
        let mut made = made.into_iter();
        self.0.into_iter().map_while(|known| known.or_else(|| made.next())).collect()
    }
}

impl ToolResult {
    /// Returns the message with the result, as chat templates read it.
    pub fn message(&self) -> Value {
        json!({"role": "tool", "name": self.name, "content": self.content})
    }
}

/// The error of a call as the policy sees it: the text of Python's `{"error": fault}`, as calls that were made report errors.
fn error_text(fault: &str) -> String {
    let quote = if fault.contains('\'') && !fault.contains('"') { '"' } else { '\'' };
    format!("{{'error': {quote}{}{quote}}}", fault.replace('\\', "\\\\").replace(quote, &format!("\\{quote}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_lm::tokenizer;
    use serde_json::Map;

    #[test]
    fn a_call_that_fails_without_being_made_has_its_result_among_those_of_the_others() {
        let call = |name: &str, fault: Option<&str>| tokenizer::ToolCall {
            name: name.into(),
            arguments: Map::new(),
            fault: fault.map(String::from),
        };
        let calls = vec![call("a", None), call("b", Some("it's none")), call("c", None)];
        let turn = Turn { message: Value::Null, calls, malformed: None };
        let (known, made) = Results::of(turn);
        assert_eq!(made.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(), ["a", "c"]);
        let failed = ToolResult::failed("b", r#"{'error': "it's none"}"#);
        let [first, last] = ["a", "c"].map(|name| ToolResult::new(name, "1"));
        assert_eq!(known.clone().with(vec![first.clone(), last.clone()]), [first.clone(), failed.clone(), last]);
        assert_eq!(known.with(vec![first.clone()]), [first, failed]);
        let broken = Turn { message: Value::Null, calls: Vec::new(), malformed: Some("no JSON".into()) };
        let (known, made) = Results::of(broken);
        assert!(made.is_empty());
        assert_eq!(known.with(Vec::new()), [ToolResult::failed("", "{'error': 'no JSON'}")]);
    }
}
