//! Arrays of numbers as bytes, as frames have them.

use super::failure::Failure;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// The type of an array's numbers, in little-endian bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dtype {
    Int64,
    Int32,
    Float64,
    Float32,
    /// A byte each, 0 or 1.
    Bool,
}

impl Dtype {
    const ALL: [(Self, &'static str); 5] = [
        (Self::Int64, "int64"),
        (Self::Int32, "int32"),
        (Self::Float64, "float64"),
        (Self::Float32, "float32"),
        (Self::Bool, "bool"),
    ];

    /// The names of all types.
    pub(super) fn names() -> Vec<&'static str> {
        Self::ALL.iter().map(|(_, name)| *name).collect()
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(dtype, _)| *dtype)
    }

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, name)| name)
    }

    /// Bytes of a number.
    pub(super) fn size(self) -> usize {
        match self {
            Self::Int64 | Self::Float64 => 8,
            Self::Int32 | Self::Float32 => 4,
            Self::Bool => 1,
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::Int64 => Kind::Int64,
            Self::Int32 => Kind::Int,
            Self::Float64 => Kind::Double,
            Self::Float32 => Kind::Float,
            Self::Bool => Kind::Uint8,
        }
    }
}

/// An array: its bytes are as many as its type and shape say.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Array {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

impl Array {
    /// An array of one dimension.
    pub(super) fn from_floats(numbers: &[f32]) -> Self {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self { dtype: Dtype::Float32, shape: vec![numbers.len()], bytes }
    }

    /// An array of one dimension.
    pub(super) fn from_ids(ids: &[i64]) -> Self {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Self { dtype: Dtype::Int64, shape: vec![ids.len()], bytes }
    }

    /// The numbers of a tensor: whole numbers as int64, truth values as bool, all others as float32.
    pub(super) fn from_tensor(x: &Tensor) -> Result<Self, Failure> {
        let (dtype, kind) = match x.kind() {
            Kind::Bool => (Dtype::Bool, Kind::Uint8),
            Kind::Int64 | Kind::Int => (Dtype::Int64, Kind::Int64),
            _ => (Dtype::Float32, Kind::Float),
        };
        let x = x.detach().to_device(Device::Cpu).to_kind(kind).contiguous();
        let mut bytes = vec![0; x.numel() * dtype.size()];
        let numel = x.numel();
        x.f_copy_data_u8(&mut bytes, numel).map_err(rlhf::Error::from)?;
        Ok(Self { dtype, shape: x.size().iter().map(|&n| n as usize).collect(), bytes })
    }

    /// The array as a tensor of its type.
    pub(super) fn tensor(&self) -> Result<Tensor, Failure> {
        let shape: Vec<i64> = self.shape.iter().map(|&n| n as i64).collect();
        let x = Tensor::f_from_data_size(&self.bytes, &shape, self.dtype.kind()).map_err(rlhf::Error::from)?;
        Ok(if self.dtype == Dtype::Bool { x.ne(0) } else { x })
    }

    /// All numbers in order, where they are whole.
    pub(super) fn ids(&self) -> Option<Vec<i64>> {
        match self.dtype {
            Dtype::Int64 => Some(self.numbers(i64::from_le_bytes)),
            Dtype::Int32 => Some(self.numbers(i32::from_le_bytes).into_iter().map(i64::from).collect()),
            Dtype::Bool => Some(self.bytes.iter().map(|&byte| i64::from(byte != 0)).collect()),
            _ => None,
        }
    }

    /// All numbers in order.
    pub(super) fn floats(&self) -> Vec<f64> {
        match self.dtype {
            Dtype::Float64 => self.numbers(f64::from_le_bytes),
            Dtype::Float32 => self.numbers(f32::from_le_bytes).into_iter().map(f64::from).collect(),
            _ => self.ids().unwrap_or_default().into_iter().map(|id| id as f64).collect(),
        }
    }

    fn numbers<const N: usize, T>(&self, read: fn([u8; N]) -> T) -> Vec<T> {
        self.bytes.chunks_exact(N).map(|bytes| read(bytes.try_into().unwrap_or([0; N]))).collect()
    }

    /// The array as its line announces it.
    pub(super) fn announced(&self) -> Value {
        json!({"dtype": self.dtype.name(), "shape": self.shape})
    }

    /// The array as nested lists; a number that is not finite is null.
    pub(super) fn to_json(&self) -> Value {
        let flat: Vec<Value> = match self.dtype {
            Dtype::Bool => self.bytes.iter().map(|&byte| json!(byte != 0)).collect(),
            Dtype::Int64 | Dtype::Int32 => self.ids().unwrap_or_default().into_iter().map(Value::from).collect(),
            // The shortest digits of an f32 are not those of its f64.
            Dtype::Float32 => self.numbers(f32::from_le_bytes).into_iter().map(|x| json!(x)).collect(),
            Dtype::Float64 => self.floats().into_iter().map(|x| json!(x)).collect(),
        };
        nested(&flat, &self.shape)
    }
}

/// `flat` as lists of this shape.
fn nested(flat: &[Value], shape: &[usize]) -> Value {
    match shape {
        [] => flat.first().cloned().unwrap_or_default(),
        [_] => flat.to_vec().into(),
        [rows, rest @ ..] => {
            let width = rest.iter().product::<usize>();
            (0..*rows).map(|row| nested(&flat[row * width..(row + 1) * width], rest)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_come_back_with_their_bits_and_shapes() {
        let floats = Tensor::from_slice(&[1.5f32, f32::NAN, -0.0, 3e-40]).view([2, 2]);
        let array = Array::from_tensor(&floats).unwrap();
        assert_eq!((array.shape.as_slice(), array.bytes.len()), (&[2, 2][..], 16));
        assert_eq!(Array::from_tensor(&array.tensor().unwrap()).unwrap(), array);
        assert_eq!(array.to_json(), json!([[1.5, null], [-0.0, 3e-40f32]]));
        let flags = Array { dtype: Dtype::Bool, shape: vec![3], bytes: vec![0, 1, 7] };
        assert_eq!(Vec::<bool>::try_from(flags.tensor().unwrap()).unwrap(), [false, true, true]);
        assert_eq!(flags.to_json(), json!([false, true, true]));
        let empty = Array { dtype: Dtype::Int64, shape: vec![0, 4], bytes: Vec::new() };
        assert_eq!((empty.tensor().unwrap().size(), empty.to_json()), (vec![0, 4], json!([])));
    }

    #[test]
    fn numbers_are_read_in_any_type() {
        let ints = Array { dtype: Dtype::Int32, shape: vec![2], bytes: vec![1, 0, 0, 0, 255, 255, 255, 255] };
        assert_eq!((ints.ids(), ints.floats()), (Some(vec![1, -1]), vec![1.0, -1.0]));
        assert_eq!(Array::from_floats(&[0.5]).ids(), None);
    }
}
