//! The units of a processor that products may use, and which of them this one has.

use std::fmt;
use std::sync::OnceLock;

/// A kind of instructions that products are made of.
///
/// ARM's units (NEON, BF16, SME) would be further variants, each with its micro-kernel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum CpuUnit {
    /// Fused multiply-add on 256 bits.
    Avx2,
    /// Fused multiply-add on 512 bits.
    Avx512,
    /// Dot products of pairs of `bf16` on 512 bits.
    Avx512Bf16,
    /// Tiles of 16 × 64 bytes.
    Amx,
}

impl CpuUnit {
    /// All of them, the slowest first.
    pub const ALL: [Self; 4] = [Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Its name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx",
        }
    }
}

/// Some units.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct UnitSet(u8);

impl UnitSet {
    /// No unit: products are left to the `gemm` crate.
    pub const NONE: Self = Self(0);

    /// What this processor and its operating system offer. AMX needs the kernel's permission, which
    /// is asked for here, once for the process.
    pub fn here() -> Self {
        static HERE: OnceLock<UnitSet> = OnceLock::new();
        *HERE.get_or_init(|| CpuUnit::ALL.into_iter().filter(|unit| found::has(*unit)).collect())
    }

    /// Whether dot products of pairs have twice the rate of singles here: on AMD's processors, not on
    /// Intel's.
    pub(super) fn dots_are_fast() -> bool {
        found::made_by_amd()
    }

    /// Whether the unit is one of them.
    pub fn has(self, unit: CpuUnit) -> bool {
        self.0 & 1 << unit as u8 != 0
    }

    /// Those that are in both.
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The units, the slowest first.
    pub fn iter(self) -> impl Iterator<Item = CpuUnit> {
        CpuUnit::ALL.into_iter().filter(move |unit| self.has(*unit))
    }
}

impl FromIterator<CpuUnit> for UnitSet {
    fn from_iter<I: IntoIterator<Item = CpuUnit>>(units: I) -> Self {
        Self(units.into_iter().fold(0, |all, unit| all | 1 << unit as u8))
    }
}

/// Names with `+` between them; `none` if there are none.
impl fmt::Display for UnitSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE {
            return f.write_str("none");
        }
        for (i, unit) in self.iter().enumerate() {
            write!(f, "{}{}", if i > 0 { "+" } else { "" }, unit.name())?;
        }
        Ok(())
    }
}

impl fmt::Debug for UnitSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(target_arch = "x86_64")]
mod found {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    use super::CpuUnit;

    pub(super) fn has(unit: CpuUnit) -> bool {
        let wide = || {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
        };
        match unit {
            CpuUnit::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            CpuUnit::Avx512 => wide(),
            CpuUnit::Avx512Bf16 => wide() && is_x86_feature_detected!("avx512bf16"),
            // What is packed for tiles is packed with AVX-512, which no such processor lacks.
            CpuUnit::Amx => wide() && tiles() && permitted(),
        }
    }

    pub(super) fn made_by_amd() -> bool {
        let name = __cpuid(0);
        [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }

    /// Whether the processor has tiles of `bf16`, and the system saves them.
    fn tiles() -> bool {
        const OSXSAVE: u32 = 1 << 27;
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const TILE_STATE: u32 = 3 << 17;
        if __cpuid(1).ecx & OSXSAVE == 0 || __cpuid(0).eax < 7 {
            return false;
        }
        let tiles = __cpuid_count(7, 0).edx;
        let (low, _high): (u32, u32);
        // SAFETY: the system has enabled the instruction, which only reads a register.
        unsafe {
            std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high, options(nomem, nostack));
        }
        tiles & AMX_BF16 != 0 && tiles & AMX_TILE != 0 && low & TILE_STATE == TILE_STATE
    }

    /// Asks Linux to let this process use the state of tiles: `arch_prctl(ARCH_REQ_XCOMP_PERM, 18)`.
    #[cfg(target_os = "linux")]
    fn permitted() -> bool {
        const ARCH_PRCTL: isize = 158;
        const REQUEST: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let outcome: isize;
        // SAFETY: the call has two numbers as arguments, and touches no memory of this process.
        unsafe {
            std::arch::asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => outcome,
                in("rdi") REQUEST,
                in("rsi") TILE_DATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        outcome == 0
    }

    #[cfg(not(target_os = "linux"))]
    fn permitted() -> bool {
        false
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod found {
    pub(super) fn has(_: super::CpuUnit) -> bool {
        false
    }

    pub(super) fn made_by_amd() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_units() {
        let some: UnitSet = [CpuUnit::Amx, CpuUnit::Avx2].into_iter().collect();
        assert_eq!(some.to_string(), "avx2+amx");
        assert!(some.has(CpuUnit::Amx) && !some.has(CpuUnit::Avx512));
        assert_eq!(some.and([CpuUnit::Avx2].into_iter().collect()).to_string(), "avx2");
        assert_eq!(UnitSet::NONE.to_string(), "none");
        // A wider unit comes with the narrower ones.
        let here = UnitSet::here();
        assert!(!here.has(CpuUnit::Avx512) || here.has(CpuUnit::Avx2), "{here}");
        assert!(!here.has(CpuUnit::Amx) || here.has(CpuUnit::Avx512), "{here}");
    }
}
