//! Finds cycles among things that wait for each other.

use std::collections::VecDeque;

/// A cycle of things that wait for each other, each for the next and the last for the first; `None`
/// if there is none. `on` lists what each thing waits for. The result is the shortest cycle through
/// the first thing that is found to be in one.
pub fn cycle(on: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut followers = vec![Vec::new(); on.len()];
    for (node, on) in on.iter().enumerate() {
        on.iter().for_each(|&needed| followers[needed].push(node));
    }
    let mut left: Vec<usize> = on.iter().map(Vec::len).collect();
    let mut ready: Vec<usize> = (0..left.len()).filter(|&node| left[node] == 0).collect();
    while let Some(node) = ready.pop() {
        for &follower in &followers[node] {
            left[follower] -= 1;
            if left[follower] == 0 {
                ready.push(follower);
            }
        }
    }
    // Everything left waits for something else that is left, so following the waits ends in a
    // cycle.
    let mut seen = vec![false; left.len()];
    let mut node = left.iter().position(|&count| count > 0)?;
    while !std::mem::replace(&mut seen[node], true) {
        node = on[node].iter().copied().find(|&on| left[on] > 0)?;
    }
    way_round(on, node)
}

/// The shortest path from a node back to itself.
fn way_round(on: &[Vec<usize>], start: usize) -> Option<Vec<usize>> {
    let mut waiter = vec![None; on.len()];
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for &on in &on[node] {
            if waiter[on].is_none() {
                waiter[on] = Some(node);
                queue.push_back(on);
            }
        }
    }
    let mut path = vec![waiter[start]?];
    while let Some(last) = path.last().copied().filter(|&last| last != start) {
        path.push(waiter[last]?);
    }
    path.reverse();
    Some(path)
}
