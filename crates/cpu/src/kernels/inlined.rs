//! How the loops of kernels are written, so that they vectorise.
//!
//! Two things stop a compiler from vectorising a loop inside a closure: a call that it does not
//! inline (it would leave the instruction set the loop is compiled for), and values captured by
//! reference, which any store in the loop might change. So closures here are always inlined and
//! capture by value, and a loop that writes is a function of its own, whose exclusive slices are
//! known not to overlap anything else.

/// A closure that is always inlined and captures by value.
macro_rules! inlined {
    ($($closure:tt)+) => {{
        #[inline(always)]
        move $($closure)+
    }};
}

pub(crate) use inlined;
