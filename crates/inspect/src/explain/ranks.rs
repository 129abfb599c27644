//! The grid of ranks: the coordinates of each rank, and which ranks communicate.

use std::collections::BTreeSet;
use std::fmt::Write;

use phalanx_call::traffic::names;
use phalanx_ir::{Axis, Mesh};
use phalanx_script::Route;
use serde_json::{Value, json};

/// The most ranks in a line, and the most groups that an entry lists.
const PER_LINE: usize = 16;
const GROUPS: usize = 8;

/// The grid as text: the fastest axis to the right, all others downwards.
pub(super) fn text<'r>(mesh: &Mesh, routes: impl Iterator<Item = &'r Route>) -> String {
    let ranks = mesh.ranks();
    let Some((fastest, across)) = mesh.axes().last() else {
        return "# ranks: 1\n\n".to_owned();
    };
    let mut text = format!("# ranks: {ranks} on the mesh {mesh}, the fastest axis last\n");
    let slower: Vec<Axis> = mesh.axes().map(|(axis, _)| axis).filter(|a| *a != fastest).collect();
    let place = |rank: usize, axis: Axis| format!("{axis}={}", mesh.coordinate(rank, axis));
    let label = |first: usize| {
        let places: Vec<String> = slower.iter().map(|&axis| place(first, axis)).collect();
        places.join(" ")
    };
    let firsts = || (0..ranks).step_by(across);
    let left = firsts().map(|first| label(first).len()).max().unwrap_or(0);
    let cell = place(across - 1, fastest).len().max((ranks - 1).to_string().len()) + 2;
    for columns in (0..across).collect::<Vec<_>>().chunks(PER_LINE) {
        let _ = write!(text, "  {:left$}", "");
        for &column in columns {
            let _ = write!(text, "{:>cell$}", place(column, fastest));
        }
        for first in firsts() {
            let _ = write!(text, "\n  {:left$}", label(first));
            for column in columns {
                let _ = write!(text, "{:>cell$}", first + column);
            }
        }
        text += "\n\n";
    }
    text += "# groups: ranks that communicate, by axes\n";
    let sets = axis_sets(mesh, routes);
    let width = sets.iter().map(|axes| names(axes).join(",").len()).max().unwrap_or(0);
    for axes in &sets {
        let groups = groups(mesh, axes);
        let of = groups.first().map_or(0, Vec::len);
        let shown: Vec<String> = groups.iter().take(GROUPS).map(|group| list(group)).collect();
        let more = match groups.len().saturating_sub(GROUPS) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let (name, count) = (names(axes).join(","), groups.len());
        let _ = writeln!(text, "  {name:width$}  {count:>4} of {of:<4} {}{more}", shown.join(" "));
    }
    text + "\n"
}

/// The same as a JSON object.
pub(super) fn json<'r>(mesh: &Mesh, routes: impl Iterator<Item = &'r Route>) -> Value {
    let axes: Vec<(Axis, usize)> = mesh.axes().collect();
    let places = |rank| axes.iter().map(|(a, _)| mesh.coordinate(rank, *a)).collect::<Vec<_>>();
    json!({"ranks": {
        "count": mesh.ranks(),
        "axes": axes.iter().map(|(a, size)| json!({"axis": a.to_string(), "size": size}))
            .collect::<Vec<_>>(),
        "coordinates": (0..mesh.ranks()).map(places).collect::<Vec<_>>(),
        "groups": axis_sets(mesh, routes).iter()
            .map(|axes| json!({"axes": names(axes), "ranks": groups(mesh, axes)}))
            .collect::<Vec<_>>(),
    }})
}

/// Every axis, and every set of axes that something is moved over.
fn axis_sets<'r>(mesh: &Mesh, routes: impl Iterator<Item = &'r Route>) -> Vec<Vec<Axis>> {
    let mut sets: Vec<Vec<Axis>> = mesh.axes().map(|(axis, _)| vec![axis]).collect();
    let used: BTreeSet<&Vec<Axis>> = routes.map(|route| &route.axes).collect();
    let several = used.into_iter().filter(|axes| axes.len() > 1);
    sets.extend(several.cloned());
    sets
}

/// The groups that a set of axes forms, by their first rank.
fn groups(mesh: &Mesh, axes: &[Axis]) -> Vec<Vec<usize>> {
    let first = |rank: &usize| axes.iter().all(|&axis| mesh.coordinate(*rank, axis) == 0);
    (0..mesh.ranks()).filter(first).map(|rank| mesh.group(rank, axes)).collect()
}

fn list(group: &[usize]) -> String {
    let shown: Vec<String> = group.iter().take(PER_LINE).map(ToString::to_string).collect();
    let more = if group.len() > PER_LINE { ",…" } else { "" };
    format!("[{}{more}]", shown.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_shows_every_rank_and_every_group() {
        let mesh = Mesh::new([("dp", 2), ("cp", 1), ("tp", 3)]).unwrap();
        let both = [mesh.axes().next().unwrap().0, mesh.axes().last().unwrap().0];
        let route = Route { op: "all_reduce", axes: both.to_vec() };
        let expected = "\
# ranks: 6 on the mesh dp=2 cp=1 tp=3, the fastest axis last
             tp=0  tp=1  tp=2
  dp=0 cp=0     0     1     2
  dp=1 cp=0     3     4     5

# groups: ranks that communicate, by axes
  dp        3 of 2    [0,3] [1,4] [2,5]
  cp        6 of 1    [0] [1] [2] [3] [4] [5]
  tp        2 of 3    [0,1,2] [3,4,5]
  dp,tp     1 of 6    [0,1,2,3,4,5]

";
        assert_eq!(text(&mesh, [&route].into_iter()), expected);
        let json = json(&mesh, [&route].into_iter());
        assert_eq!(json["ranks"]["coordinates"][4], json!([1, 0, 1]));
        assert_eq!(json["ranks"]["groups"][3]["ranks"], json!([[0, 1, 2, 3, 4, 5]]));
    }

    #[test]
    fn long_lines_are_broken_and_long_lists_cut() {
        let mesh = Mesh::new([("dp", 32)]).unwrap();
        let text = text(&mesh, [].into_iter());
        assert!(text.lines().all(|line| line.len() < 130), "{text}");
        assert!(text.contains(" 31\n") && text.contains(",15,…]"), "{text}");
    }
}
