//! The parameters of a request, by name and type.

use super::arrays::Array;
use super::failure::Failure;
use rlhf::schema::Choices;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use tch::{Kind, Tensor};

/// The parameters of a request; null stands for no value.
pub(super) struct Params<'a> {
    values: &'a Map<String, Value>,
    frames: &'a [Array],
    read: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Params<'a> {
    pub(super) fn new(values: &'a Map<String, Value>, frames: &'a [Array]) -> Self {
        Self { values, frames, read: RefCell::default() }
    }

    /// Refuses parameters that nothing has read.
    pub(super) fn finish(&self, method: &str) -> Result<(), Failure> {
        let read = self.read.borrow();
        match self.values.keys().find(|name| !read.contains(name.as_str())) {
            Some(name) => {
                let known: Vec<&str> = read.iter().copied().collect();
                Err(Failure::usage(name, format!("{method}: `{name}`: expected one of {}", known.join(", "))))
            }
            None => Ok(()),
        }
    }

    fn get(&self, name: &'a str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(name);
        self.values.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        name: &'a str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let wrong =
            |value: &Value| Failure::usage(name, format!("{name}: expected {expected}, found {}", brief(value)));
        self.get(name).map(|value| read(value).ok_or_else(|| wrong(value))).transpose()
    }

    /// The parameter that `read` reads, which must be there.
    pub(super) fn needed<T>(
        &self,
        name: &'a str,
        read: impl Fn(&Self, &'a str) -> Result<Option<T>, Failure>,
    ) -> Result<T, Failure> {
        read(self, name)?.ok_or_else(|| Failure::usage(name, format!("{name}: expected a value, found none")))
    }

    pub(super) fn flag(&self, name: &'a str) -> Result<Option<bool>, Failure> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(super) fn count(&self, name: &'a str) -> Result<Option<usize>, Failure> {
        self.typed(name, "a whole number from 0 on", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub(super) fn number(&self, name: &'a str) -> Result<Option<f64>, Failure> {
        self.typed(name, "a number", Value::as_f64)
    }

    pub(super) fn text(&self, name: &'a str) -> Result<Option<&'a str>, Failure> {
        self.typed(name, "a text", Value::as_str)
    }

    pub(super) fn path(&self, name: &'a str) -> Result<Option<PathBuf>, Failure> {
        Ok(self.text(name)?.map(PathBuf::from))
    }

    pub(super) fn map(&self, name: &'a str) -> Result<Option<&'a Map<String, Value>>, Failure> {
        self.typed(name, "an object", Value::as_object)
    }

    pub(super) fn texts(&self, name: &'a str) -> Result<Option<Vec<String>>, Failure> {
        let text = |value: &Value| value.as_str().map(String::from);
        self.typed(name, "a list of texts", |value| value.as_array()?.iter().map(text).collect())
    }

    /// One of a fixed set of names.
    pub(super) fn choice<T: Choices>(&self, name: &'a str) -> Result<Option<T>, Failure> {
        self.typed(name, T::EXPECTED, |value| T::named(value.as_str()?))
    }

    /// The array that a value stands for.
    fn frame(&self, value: &Value) -> Option<&'a Array> {
        self.frames.get(usize::try_from(value.get("frame")?.as_u64()?).ok()?)
    }

    /// A list of numbers, which are finite where they are in the line.
    pub(super) fn numbers(&self, name: &'a str) -> Result<Option<Vec<f64>>, Failure> {
        self.typed(name, "a list of numbers", |value| match value {
            Value::Array(list) => list.iter().map(Value::as_f64).collect(),
            value => Some(self.frame(value)?.floats()),
        })
    }

    /// A list of whole numbers.
    pub(super) fn ids(&self, name: &'a str) -> Result<Option<Vec<i64>>, Failure> {
        self.typed(name, "a list of whole numbers", |value| match value {
            Value::Array(list) => list.iter().map(Value::as_i64).collect(),
            value => self.frame(value)?.ids(),
        })
    }

    /// Rows of token ids, as lists, as `{"frame": n, "lengths": [...]}`, or as an array of two dimensions.
    pub(super) fn rows(&self, name: &'a str) -> Result<Option<Vec<Vec<i64>>>, Failure> {
        let id = |value: &Value| value.as_i64().or_else(|| value.as_bool().map(i64::from));
        let row = |value: &Value| value.as_array()?.iter().map(id).collect::<Option<Vec<i64>>>();
        self.typed(name, "rows of whole numbers", |value| match value {
            Value::Array(rows) => rows.iter().map(row).collect(),
            value => {
                let array = self.frame(value)?;
                let lengths = value.get("lengths").map(|lengths| {
                    lengths.as_array()?.iter().map(|n| Some(n.as_u64()? as usize)).collect::<Option<Vec<usize>>>()
                });
                let lengths = match (lengths, &array.shape[..]) {
                    (Some(lengths), _) => lengths?,
                    (None, &[rows, width]) if rows <= MOST_ROWS => vec![width; rows],
                    _ => return None,
                };
                cut(&array.ids()?, &lengths)
            }
        })
    }

    /// Rows of truth values.
    pub(super) fn masks(&self, name: &'a str) -> Result<Option<Vec<Vec<bool>>>, Failure> {
        let row_mask = |row: Vec<i64>| row.into_iter().map(|kept| kept != 0).collect();
        Ok(self.rows(name)?.map(|rows| rows.into_iter().map(row_mask).collect()))
    }

    /// A tensor of numbers with `dims` dimensions, f32 or, with `Kind::Int64` or `Kind::Bool`, of that kind.
    pub(super) fn tensor(&self, name: &'a str, dims: usize, kind: Kind) -> Result<Option<Tensor>, Failure> {
        let expected = format!("an array of {dims} dimension{}", if dims == 1 { "" } else { "s" });
        let read = |value: &'a Value| match value {
            Value::Array(_) => tensor_from_lists(value, dims),
            value => {
                let array = self.frame(value).filter(|array| array.shape.len() == dims)?;
                // Numbers with fractions are no ids.
                let is_whole = kind != Kind::Int64 || array.ids().is_some();
                array.tensor().ok().filter(|_| is_whole)
            }
        };
        Ok(self.typed(name, &expected, read)?.map(|x| if kind == Kind::Bool { x.ne(0) } else { x.to_kind(kind) }))
    }

    /// Tensors of two dimensions, all of which must be there.
    pub(super) fn tensors<const N: usize>(&self, names: [&'a str; N], kind: Kind) -> Result<[Tensor; N], Failure> {
        let mut tensors = Vec::with_capacity(N);
        for name in names {
            tensors.push(self.needed(name, |params, name| params.tensor(name, 2, kind))?);
        }
        tensors.try_into().map_err(|_| Failure::internal("as many tensors as names"))
    }
}

/// Most rows of token ids in an array: each is a list of its own.
const MOST_ROWS: usize = 1 << 20;

/// Cuts `flat` into rows of these lengths; `None` unless they are all of it.
fn cut(flat: &[i64], lengths: &[usize]) -> Option<Vec<Vec<i64>>> {
    let mut rest = flat;
    let rows = lengths.iter().map(|&length| rest.split_off(..length).map(<[i64]>::to_vec));
    let rows = rows.collect::<Option<Vec<_>>>()?;
    rest.is_empty().then_some(rows)
}

/// The tensor of nested lists of numbers or truth values.
fn tensor_from_lists(value: &Value, dims: usize) -> Option<Tensor> {
    fn gather(value: &Value, depth: usize, shape: &mut Vec<i64>, flat: &mut Vec<f64>) -> Option<()> {
        let Some(list) = value.as_array().filter(|_| depth < shape.len()) else {
            flat.push(value.as_f64().or_else(|| value.as_bool().map(|yes| f64::from(u8::from(yes))))?);
            return (depth == shape.len()).then_some(());
        };
        match shape[depth] {
            -1 => shape[depth] = list.len() as i64,
            known if known == list.len() as i64 => {}
            _ => return None,
        }
        list.iter().try_for_each(|value| gather(value, depth + 1, shape, flat))
    }
    let mut shape = vec![-1; dims];
    let mut flat = Vec::new();
    gather(value, 0, &mut shape, &mut flat)?;
    shape.iter_mut().filter(|n| **n < 0).for_each(|n| *n = 0);
    Tensor::f_from_slice(&flat).ok()?.f_view(&shape[..]).ok()
}

/// The beginning of a value, for an error.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::arrays::Dtype;
    use serde_json::json;

    #[test]
    fn rows_are_lists_or_frames() {
        let frames = [Array::from_ids(&[1, 2, 3]), Array { shape: vec![3, 1], ..Array::from_ids(&[1, 2, 3]) }];
        let values = json!({
            "lists": [[1, 2], [3]], "ragged": {"frame": 0, "lengths": [2, 1]}, "whole": {"frame": 1},
            "long": {"frame": 0, "lengths": [2, 2]}, "short": {"frame": 0, "lengths": [2]}, "flat": {"frame": 0},
            "far": {"frame": 2}, "floats": [[1.5]],
        });
        let params = Params::new(values.as_object().unwrap(), &frames);
        let expected = Some(vec![vec![1, 2], vec![3]]);
        assert_eq!(params.rows("lists"), Ok(expected.clone()));
        assert_eq!(params.rows("ragged"), Ok(expected));
        assert_eq!(params.rows("whole"), Ok(Some(vec![vec![1], vec![2], vec![3]])));
        for wrong in ["long", "short", "flat", "far", "floats"] {
            assert!(params.rows(wrong).unwrap_err().message().starts_with(wrong), "{wrong}");
        }
        assert_eq!(params.rows("none"), Ok(None));
        assert!(params.needed("none", Params::rows).unwrap_err().message().contains("found none"));
    }

    #[test]
    fn tensors_are_nested_lists_or_frames_of_their_number_of_dimensions() {
        let frames = [Array { dtype: Dtype::Bool, shape: vec![2, 1], bytes: vec![1, 0] }];
        let values = json!({"lists": [[1, 2.5], [3, 4]], "frame": {"frame": 0}, "ragged": [[1], [2, 3]], "deep": [[[1]]],
                            "flat": [1, 2], "empty": []});
        let params = Params::new(values.as_object().unwrap(), &frames);
        let lists = params.tensor("lists", 2, Kind::Float).unwrap().unwrap();
        assert_eq!(Vec::<Vec<f32>>::try_from(lists).unwrap(), [[1.0, 2.5], [3.0, 4.0]]);
        let frame = params.tensor("frame", 2, Kind::Bool).unwrap().unwrap();
        assert_eq!((frame.kind(), frame.size()), (Kind::Bool, vec![2, 1]));
        for wrong in ["ragged", "deep", "flat"] {
            assert!(params.tensor(wrong, 2, Kind::Float).is_err(), "{wrong}");
        }
        assert_eq!(params.tensor("empty", 2, Kind::Float).unwrap().unwrap().size(), [0, 0]);
    }

    #[test]
    fn parameters_that_nothing_reads_are_refused() {
        let values = json!({"dir": "a", "dri": "b"});
        let params = Params::new(values.as_object().unwrap(), &[]);
        params.text("dir").unwrap();
        assert_eq!(params.finish("save"), Err(Failure::usage("dri", "save: `dri`: expected one of dir")));
    }
}
