//! Slurm's short form of host names: `gpu[03-05,9],login`.

/// The first host of a list; `None` if the list is not one.
pub(super) fn first_host(list: &str) -> Option<String> {
    let first = split(list)?.into_iter().next()?;
    expand(first)?.into_iter().next()
}

/// All hosts of a list, in its order; `None` if the list is not one.
#[cfg(test)]
fn hosts(list: &str) -> Option<Vec<String>> {
    let parts = split(list)?.into_iter().map(expand).collect::<Option<Vec<_>>>()?;
    Some(parts.concat())
}

/// Divides a list at its commas, except those inside brackets.
fn split(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return None,
            '[' => inside = true,
            ']' if !inside => return None,
            ']' => inside = false,
            ',' if !inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    (!inside && parts.iter().all(|part| !part.is_empty())).then_some(parts)
}

/// The most hosts that a range is expanded to.
const MOST: usize = 1 << 16;

/// One part of a list, with at most one pair of brackets.
fn expand(part: &str) -> Option<Vec<String>> {
    let Some((before, rest)) = part.split_once('[') else { return Some(vec![part.to_owned()]) };
    let (ranges, after) = rest.split_once(']')?;
    if after.contains('[') {
        return None;
    }
    let mut hosts = Vec::new();
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        // Numbers keep the width they are written with: 03, 04, 05.
        let width = low.len();
        let (low, high): (usize, usize) = (digits(low)?, digits(high)?);
        if high < low || high - low >= MOST {
            return None;
        }
        hosts.extend((low..=high).map(|number| format!("{before}{number:0width$}{after}")));
    }
    Some(hosts)
}

fn digits(text: &str) -> Option<usize> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_expanded_in_their_order() {
        for (list, expected) in [
            ("login", "login"),
            ("a,b", "a b"),
            ("gpu[03-05,9]", "gpu03 gpu04 gpu05 gpu9"),
            ("gpu[3,1],c[8-10].site", "gpu3 gpu1 c8.site c9.site c10.site"),
            ("n[0099-0101]", "n0099 n0100 n0101"),
        ] {
            assert_eq!(hosts(list).unwrap_or_default().join(" "), expected);
            let first = expected.split(' ').next().map(str::to_owned);
            assert_eq!(first_host(list), first, "{list}");
        }
    }

    #[test]
    fn other_text_is_not_a_list() {
        for list in ["", ",", "a,", "a[", "a]", "a[1", "a[[1]]", "a[b-c]", "a[5-3]", "a[-1]", "a[]"]
        {
            assert_eq!(hosts(list), None, "{list}");
        }
        assert_eq!(first_host("a[0-99999999999]"), None);
    }
}
