//! Amounts formatted for people, with few digits.

/// `950`, `12.4k`, `3.10M`: three significant digits.
pub fn short(number: f64) -> String {
    match number {
        n if n.is_nan() || n < 999.5 => format!("{n:.0}"),
        n if n < 999_500.0 => format!("{}k", three_digits(n / 1e3)),
        n if n < 999_500_000.0 => format!("{}M", three_digits(n / 1e6)),
        n => format!("{}G", three_digits(n / 1e9)),
    }
}

/// A number below 1000 with three significant digits: `9.99`, `12.4`, `999`.
pub fn three_digits(number: f64) -> String {
    match number {
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

/// An amount of memory in the unit that suits it: `61.2 MiB`.
pub fn bytes(amount: u64) -> String {
    let (unit, size) = match amount {
        1 => return "1 byte".into(),
        handful if handful < 1 << 10 => return format!("{handful} bytes"),
        few if few < 1 << 20 => ("KiB", 1u64 << 10),
        some if some < 1 << 30 => ("MiB", 1 << 20),
        _ => ("GiB", 1 << 30),
    };
    format!("{:.1} {unit}", amount as f64 / size as f64)
}

/// `1 step`, `2 steps`.
pub fn counted(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_two_or_three_digits_that_matter() {
        let shorts = [0.4, 999.0, 999.6, 9_999.0, 12_400.0, 999_499.0, 3.1e6, 2.5e9].map(short);
        assert_eq!(shorts, ["0", "999", "1.00k", "10.0k", "12.4k", "999k", "3.10M", "2.50G"]);
        let sizes = [1, 512, 1536, 3 << 20, 5 << 29].map(bytes);
        assert_eq!(sizes, ["1 byte", "512 bytes", "1.5 KiB", "3.0 MiB", "2.5 GiB"]);
        assert_eq!([0, 1, 2].map(|n| counted(n, "step")), ["0 steps", "1 step", "2 steps"]);
    }
}
