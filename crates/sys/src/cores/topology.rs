//! Which cores ranks get: physical cores before hyper-threads, and those of one memory node together.
//!
//! A hyper-thread shares the units of a physical core, so two threads that multiply gain nothing from it;
//! memory of another socket is slower than one's own. What the system says of its cores is read where ranks are started
//! ([`Topology::here`]); who gets which is a pure function of that ([`Topology::assign`]).

use std::path::Path;

use super::allowed_cores;

/// A core as the system numbers them: one hyper-thread of a physical core.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogicalCore {
    /// Its number.
    pub id: usize,
    /// The lowest number among the hyper-threads of its physical core, of which this process may
    /// not be allowed all.
    pub physical: usize,
    /// The memory node that it is close to.
    pub node: usize,
}

/// The cores that a process may use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    /// By node, then by physical core, then by number.
    cores: Vec<LogicalCore>,
}

impl Topology {
    /// These cores, in any order.
    pub fn new(mut cores: Vec<LogicalCore>) -> Self {
        cores.sort_by_key(|core| (core.node, core.physical, core.id));
        Self { cores }
    }

    /// The cores that the calling thread may run on, as Linux describes them under `/sys`.
    pub fn here() -> Self {
        Self::described(Path::new("/sys/devices/system"), &allowed_cores())
    }

    /// Some cores, as the files below a folder describe them. Of a core that they do not describe it is
    /// assumed that it shares nothing, and is on node 0.
    pub fn described(system: &Path, allowed: &[usize]) -> Self {
        let list = |path: &Path| {
            std::fs::read_to_string(path).ok().and_then(|text| parse_list(text.trim()))
        };
        let nodes: Vec<(usize, Vec<usize>)> = (std::fs::read_dir(system.join("node")).into_iter())
            .flatten()
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let number = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
                Some((number, list(&path.join("cpulist"))?))
            })
            .collect();
        let of = |&id: &usize| {
            let folder = system.join(format!("cpu/cpu{id}/topology"));
            // The second is what older kernels call the same list.
            let siblings = list(&folder.join("core_cpus_list"))
                .or_else(|| list(&folder.join("thread_siblings_list")));
            let physical = siblings.and_then(|all| all.into_iter().min()).unwrap_or(id);
            let node = nodes.iter().find(|(_, cores)| cores.contains(&id));
            LogicalCore { id, physical, node: node.map_or(0, |(number, _)| *number) }
        };
        Self::new(allowed.iter().map(of).collect())
    }

    /// How many physical cores there are.
    pub fn physical_cores(&self) -> usize {
        self.cores.iter().filter(|core| self.is_first(core)).count()
    }

    /// For each of some ranks the cores of its threads, one for each thread and none twice; nothing if
    /// there are too few.
    ///
    /// If physical cores suffice, each thread has one of its own; if not, both threads of a core are taken before
    /// the next core, so that a rank stays on one node. Each rank's cores are on one node
    /// while there is one that has enough of them. Ranks are spread evenly over nodes, so that each
    /// has its share of all memory channels, and neighbours in number, which communicate most, are
    /// together.
    pub fn assign(&self, ranks: usize, threads: usize) -> Option<Vec<Vec<usize>>> {
        let wanted = ranks.checked_mul(threads)?;
        let mut free: Vec<LogicalCore> = match wanted <= self.physical_cores() {
            true => self.cores.iter().filter(|core| self.is_first(core)).copied().collect(),
            false => self.cores.clone(),
        };
        if wanted > free.len() {
            return None;
        }
        let counts = self.ranks_on_nodes(&free, ranks, threads);
        let placed = counts.into_iter().flat_map(|(node, count)| vec![Some(node); count]);
        // Who fits on no node takes what the others leave, and so comes after them.
        let places = placed.chain(std::iter::repeat(None)).take(ranks);
        let mut take = |node: Option<usize>| -> Vec<usize> {
            let fits = |core: &LogicalCore| node.is_none_or(|node| core.node == node);
            let taken: Vec<LogicalCore> = free.iter().copied().filter(fits).take(threads).collect();
            free.retain(|core| !taken.contains(core));
            taken.iter().map(|core| core.id).collect()
        };
        Some(places.map(&mut take).collect())
    }

    /// How many ranks each node takes, such that all nodes are used equally as far as they go.
    fn ranks_on_nodes(
        &self,
        free: &[LogicalCore],
        ranks: usize,
        threads: usize,
    ) -> Vec<(usize, usize)> {
        let mut nodes: Vec<usize> = free.iter().map(|core| core.node).collect();
        nodes.dedup();
        let size = |node: usize| free.iter().filter(|core| core.node == node).count();
        let mut counts: Vec<(usize, usize)> = nodes.into_iter().map(|node| (node, 0)).collect();
        for _ in 0..ranks {
            // The one of which the smallest part is used afterwards; the first of several.
            let after = |&(_, count): &(usize, usize)| (count + 1) * threads;
            let roomy = counts.iter_mut().filter(|entry| after(entry) <= size(entry.0));
            let least = roomy.min_by(|a, b| (after(a) * size(b.0)).cmp(&(after(b) * size(a.0))));
            let Some((_, count)) = least else { break };
            *count += 1;
        }
        counts
    }

    /// Whether no other core here is an earlier hyper-thread of the same physical core.
    fn is_first(&self, core: &LogicalCore) -> bool {
        let same =
            |other: &&LogicalCore| (other.physical, other.node) == (core.physical, core.node);
        self.cores.iter().find(same).is_some_and(|first| first.id == core.id)
    }
}

/// A list as Linux writes it, such as `0-3,8`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;

    /// Sockets × cores × threads, numbered as Linux does: the first threads of all cores come first.
    fn machine(sockets: usize, cores: usize, threads: usize) -> Vec<LogicalCore> {
        let all = sockets * cores;
        let core = |id: usize| {
            let physical = id % all;
            LogicalCore { id, physical, node: physical / cores }
        };
        (0..all * threads).map(core).collect()
    }

    fn two_sockets() -> Topology {
        Topology::new(machine(2, 8, 2))
    }

    #[test]
    fn physical_cores_come_first_and_ranks_stay_on_their_node() {
        let here = two_sockets();
        assert_eq!(here.physical_cores(), 16);
        let of = |ranks, threads| here.assign(ranks, threads).unwrap();
        assert_eq!(of(1, 4), [[0, 1, 2, 3]]);
        assert_eq!(of(2, 4), [[0, 1, 2, 3], [8, 9, 10, 11]]);
        assert_eq!(of(4, 4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]);
        // Three ranks of four threads: two are together, none is on both nodes.
        assert_eq!(of(3, 4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]);
        // One rank that needs more than a node has.
        assert_eq!(of(1, 16), [(0..16).collect::<Vec<_>>()]);
        // Five threads: two ranks have a node each, the third takes what is left on both.
        let third = of(3, 5).pop().unwrap();
        assert_eq!(third, [5, 6, 7, 13, 14]);
    }

    #[test]
    fn hyper_threads_are_used_where_physical_cores_do_not_suffice() {
        let here = two_sockets();
        // The two hyper-threads of a physical core go to one rank.
        assert_eq!(here.assign(16, 2).unwrap()[9], [9, 25]);
        assert_eq!(
            here.assign(2, 16).unwrap()[1],
            [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31]
        );
        assert_eq!(here.assign(33, 1), None);
        assert_eq!(here.assign(2, 17), None);
        assert_eq!(here.assign(usize::MAX, 2), None);
    }

    /// Every assignment on machines of all kinds, with cores missing as a control group leaves them out.
    #[test]
    fn no_core_is_given_twice_and_none_is_shared_without_need() {
        for (sockets, cores, threads) in [(1, 2, 1), (1, 8, 2), (2, 8, 2), (4, 3, 2), (2, 5, 4)] {
            for hole in [usize::MAX, 2, 3, 5] {
                let mut all = machine(sockets, cores, threads);
                all.retain(|core| !core.id.is_multiple_of(hole.min(1 << 20)) || core.id == 0);
                let here = Topology::new(all.clone());
                let physical: BTreeSet<usize> = all.iter().map(|core| core.physical).collect();
                assert_eq!(here.physical_cores(), physical.len());
                for (ranks, each) in (1..9).flat_map(|r| (1..9).map(move |t| (r, t))) {
                    let found = here.assign(ranks, each);
                    assert_eq!(found.is_some(), ranks * each <= all.len(), "{ranks} × {each}");
                    let Some(found) = found else { continue };
                    assert_eq!(found.len(), ranks);
                    assert!(found.iter().all(|own| own.len() == each));
                    let given: BTreeSet<usize> = found.iter().flatten().copied().collect();
                    assert_eq!(given.len(), ranks * each, "a core was given twice");
                    let of = |id: &usize| *all.iter().find(|core| core.id == *id).unwrap();
                    let used: BTreeSet<usize> = given.iter().map(|id| of(id).physical).collect();
                    let least = physical.len().min(ranks * each);
                    if ranks * each <= physical.len() {
                        assert_eq!(used.len(), least, "hyper-threads before physical cores");
                    }
                    // The first rank is on one node if any node has room for it.
                    let pool = given.len() <= physical.len();
                    let room = |node: usize| {
                        let on = all.iter().filter(|core| core.node == node);
                        match pool {
                            true => on.map(|core| core.physical).collect::<BTreeSet<_>>().len(),
                            false => on.count(),
                        }
                    };
                    let nodes: BTreeSet<usize> = found[0].iter().map(|id| of(id).node).collect();
                    assert!(nodes.len() == 1 || (0..sockets).all(|node| room(node) < each));
                }
            }
        }
    }

    #[test]
    fn what_the_system_says_is_read() {
        let dir = std::env::temp_dir().join(format!("phalanx-topology-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = dir.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("node/node0/cpulist", "0-1,4-5\n");
        write("node/node1/cpulist", "2-3,6\n");
        write("node/possible", "0-1\n");
        for id in [0, 1, 2, 3, 4, 5] {
            let siblings = format!("{},{}\n", id % 4, id % 4 + 4);
            // Old kernels have only the older name.
            let name = if id == 2 { "thread_siblings_list" } else { "core_cpus_list" };
            write(&format!("cpu/cpu{id}/topology/{name}"), &siblings);
        }
        let found = Topology::described(&dir, &[6, 5, 2, 1, 0]);
        fs::remove_dir_all(&dir).unwrap();
        let core = |id, physical, node| LogicalCore { id, physical, node };
        // 5 is the second thread of a core; of 6 nothing is written but its node.
        let cores = vec![core(0, 0, 0), core(1, 1, 0), core(5, 1, 0), core(2, 2, 1), core(6, 6, 1)];
        assert_eq!(found, Topology { cores });
        assert_eq!(found.physical_cores(), 4);
        assert_eq!(found.assign(2, 2).unwrap(), [[0, 1], [2, 6]]);
        assert_eq!(parse_list("0-x"), None);
    }

    #[test]
    fn this_machine_has_the_cores_that_are_allowed() {
        let here = Topology::here();
        let mut ids: Vec<usize> = here.cores.iter().map(|core| core.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, allowed_cores());
        assert!((1..=ids.len()).contains(&here.physical_cores()));
    }
}
