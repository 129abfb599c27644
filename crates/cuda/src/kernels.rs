//! The sources of kernels, and which kernel of which source a call needs.

use phalanx_ir::DType;

/// A file of kernels. A program is compiled from the files that it needs, in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Source {
    Common,
    Elementwise,
    Movement,
    Random,
    Dropout,
    Rotary,
    Rows,
    Norms,
    Reduce,
    Update,
    Embedding,
    Routing,
    Tensor,
    Grouped,
    GroupedTensor,
    Attention,
    KeyProduct,
    Product,
    Loss,
    Ranks,
    Draw,
    Window,
}

impl Source {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Source::Common => include_str!("kernels/common.cu"),
            Source::Elementwise => include_str!("kernels/elementwise.cu"),
            Source::Movement => include_str!("kernels/movement.cu"),
            Source::Random => include_str!("kernels/random.cu"),
            Source::Dropout => include_str!("kernels/dropout.cu"),
            Source::Rotary => include_str!("kernels/rotary.cu"),
            Source::Rows => include_str!("kernels/rows.cu"),
            Source::Norms => include_str!("kernels/norms.cu"),
            Source::Reduce => include_str!("kernels/reduce.cu"),
            Source::Update => include_str!("kernels/update.cu"),
            Source::Embedding => include_str!("kernels/embedding.cu"),
            Source::Routing => include_str!("kernels/routing.cu"),
            Source::Tensor => include_str!("kernels/tensor.cu"),
            Source::Grouped => include_str!("kernels/grouped.cu"),
            Source::GroupedTensor => include_str!("kernels/grouped_tensor.cu"),
            Source::Attention => include_str!("kernels/attention.cu"),
            Source::KeyProduct => include_str!("kernels/key_product.cu"),
            Source::Product => include_str!("kernels/product.cu"),
            Source::Loss => include_str!("kernels/loss.cu"),
            Source::Ranks => include_str!("kernels/ranks.cu"),
            Source::Draw => include_str!("kernels/draw.cu"),
            Source::Window => include_str!("kernels/window.cu"),
        }
    }

    /// The files that this one uses, itself included.
    pub(crate) fn with_used(self) -> Vec<Source> {
        use Source::{Common, Elementwise, Random};
        let mut all = match self {
            Common => vec![],
            Source::Dropout | Source::Draw => vec![Common, Random],
            Source::Rows | Source::Update | Source::Reduce => vec![Common, Elementwise],
            Source::Norms | Source::Loss => vec![Common, Elementwise, Source::Rows],
            Source::Attention => vec![Common, Elementwise, Random],
            Source::GroupedTensor => vec![Common, Source::Tensor, Source::Grouped],
            _ => vec![Common],
        };
        all.push(self);
        all
    }
}

/// A kernel: an instance of a template, or a function that was generated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct KernelSpec {
    /// The file that has it, or whose functions the generated one uses.
    pub(crate) source: Source,
    /// Its name, such as `fill<float>`. Equal names are the same kernel.
    pub(crate) entry: String,
    /// What people read in a trace.
    pub(crate) title: String,
    /// Its text, if it was generated.
    pub(crate) generated: Option<String>,
    /// The most shared memory that a launch asks for.
    pub(crate) shared: u32,
}

impl KernelSpec {
    /// An instance of a template.
    pub(crate) fn of(source: Source, name: &str, arguments: &[&str]) -> Self {
        let entry = format!("{name}<{}>", arguments.join(", "));
        Self { source, title: entry.clone(), entry, generated: None, shared: MOST_SHARED }
    }
}

/// What a GPU of version 8.0 gives a block at most, with some room for static arrays.
pub(crate) const MOST_SHARED: u32 = 144 << 10;

/// Whether a type is a float of 16 bits, which is computed in f32.
pub(crate) const fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::Bf16 | DType::F16)
}

/// The name of an element type in kernels.
pub(crate) const fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::Bf16 => "bf16",
        DType::F16 => "half",
        DType::I32 => "int",
        DType::U16 => "u16",
        DType::Bool => "u8",
    }
}
