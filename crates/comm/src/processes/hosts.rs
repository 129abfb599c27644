//! Which ranks each host has: by a file that lists hosts, by an agent's place, or by Slurm.
//!
//! A file has a host on each line, as for Open MPI: `name slots=4`. A `#` begins a comment. This is
//! pure: it reads text and variables that it is given.

use std::ops::Range;

use super::environment::{BadEnvironment, TRIES, Variables, bad, names, slurm};
use super::hello::Token;

/// Which ranks of a job one host has, and where all meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostShare {
    /// Its first rank.
    pub first: usize,
    /// How many it has.
    pub count: usize,
    /// How many ranks the job has.
    pub ranks: usize,
    /// The host of rank 0, and the first port to try there.
    pub meet: (String, u16),
}

impl HostShare {
    /// How many ports from the first on are tried.
    pub const PORTS: u16 = TRIES;

    /// The share of this host if every host of a Slurm step has this many ranks, and one task.
    pub fn of_slurm(
        get: &dyn Fn(&str) -> Option<String>,
        count: usize,
    ) -> Result<Self, BadEnvironment> {
        let variables = Variables(get);
        let number = |name| Ok((name, variables.number(name)?));
        let numbers =
            [number("SLURM_PROCID")?, number("SLURM_NTASKS")?, number("SLURM_STEP_NUM_NODES")?];
        if let Some((name, _)) = numbers.iter().find(|(_, number)| number.is_none()) {
            return Err(bad(
                format!("{name} is not set: this process is not a task of srun"),
                "start it with srun --ntasks-per-node=1, or give --first, --ranks and --meet",
            ));
        }
        let [host, tasks, hosts] = numbers.map(|(_, number)| number.unwrap_or_default());
        if tasks != hosts || host >= hosts {
            return Err(bad(
                format!("SLURM_NTASKS = {tasks}, but SLURM_STEP_NUM_NODES = {hosts}"),
                "start one agent on each host: srun --ntasks-per-node=1",
            ));
        }
        let (name, ports, _) = slurm(&variables)?;
        let port = match variables.number("MASTER_PORT")? {
            None => ports.first().copied(),
            Some(port) => u16::try_from(port).ok().filter(|&port| port <= u16::MAX - TRIES),
        };
        let Some(port) = port else {
            return Err(bad("MASTER_PORT is not a port", "unset it: it follows from the job"));
        };
        let meet = (variables.text("MASTER_ADDR").unwrap_or(name), port);
        Ok(Self { first: host * count, count, ranks: hosts * count, meet })
    }

    /// The variables of one of its ranks.
    pub fn variables(&self, rank: usize, token: &Token) -> Vec<(&'static str, String)> {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.ranks.to_string()),
            ("LOCAL_RANK", (rank - self.first).to_string()),
            ("LOCAL_WORLD_SIZE", self.count.to_string()),
            ("MASTER_ADDR", self.meet.0.clone()),
            ("MASTER_PORT", self.meet.1.to_string()),
            (names::PORTS, Self::PORTS.to_string()),
            (names::TOKEN, token.hex()),
        ]
    }
}

/// A host that a file lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHost {
    /// What a remote shell is given.
    pub name: String,
    /// How many ranks it may have.
    pub slots: usize,
}

impl ListedHost {
    /// The hosts of a file, which have room for this many ranks.
    pub fn of_file(text: &str, ranks: usize) -> Result<Vec<Self>, BadHostFile> {
        let mut hosts: Vec<(usize, Self)> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let (line, number) = (line.split('#').next().unwrap_or_default(), at + 1);
            let Some((name, slots)) = read_line(line, number)? else { continue };
            if let Some((before, _)) = hosts.iter().find(|(_, known)| known.name == name) {
                return Err(BadHostFile {
                    line: Some(number),
                    problem: format!("{name} is on line {before} already"),
                    fix: "write each host once, with all its slots".to_owned(),
                });
            }
            hosts.push((number, Self { name: name.to_owned(), slots }));
        }
        let slots: usize = hosts.iter().map(|(_, host)| host.slots).sum();
        if slots < ranks {
            let (problem, fix) = match hosts.len() {
                0 => ("no host is listed".to_owned(), "write a host on each line: name slots=4"),
                _ => (
                    format!(
                        "{ranks} ranks need as many slots, and all hosts together have {slots}"
                    ),
                    "add hosts or slots, or start fewer ranks",
                ),
            };
            return Err(BadHostFile { line: None, problem, fix: fix.to_owned() });
        }
        Ok(hosts.into_iter().map(|(_, host)| host).collect())
    }

    /// The name by which other hosts reach it.
    pub fn address(&self) -> &str {
        self.name.rsplit('@').next().unwrap_or_default()
    }
}

/// Which ranks each host gets that has so many slots: ranks fill them in order.
pub fn fill_slots(slots: impl IntoIterator<Item = usize>, ranks: usize) -> Vec<Range<usize>> {
    let mut first = 0;
    let share = |slots: usize| {
        let own = first..(first + slots).min(ranks);
        first = own.end;
        own
    };
    slots.into_iter().map(share).collect()
}

/// What is wrong with a file of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadHostFile {
    /// The line, from 1; none if it is about the whole file.
    pub line: Option<usize>,
    /// What is wrong, with the values.
    pub problem: String,
    /// What to do.
    pub fix: String,
}

/// The most slots of a host.
const MOST: usize = 1 << 16;

/// The host of a line and its slots; nothing if the line is empty.
fn read_line(line: &str, number: usize) -> Result<Option<(&str, usize)>, BadHostFile> {
    let wrong = |problem: String, fix: &str| {
        Err(BadHostFile { line: Some(number), problem, fix: fix.to_owned() })
    };
    let mut words = line.split_whitespace();
    let Some(name) = words.next() else { return Ok(None) };
    // A name goes to another program as an argument, where a dash would begin an option.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(plain) {
        return wrong(
            format!("{name:?} is not the name of a host"),
            "write a name or an address first, then slots=N",
        );
    }
    let mut slots = None;
    for word in words {
        let Some((key, value)) = word.split_once('=') else {
            return wrong(format!("{word:?} is not understood"), "write slots=N after the host");
        };
        match (key, value.parse()) {
            ("slots", _) if slots.is_some() => {
                return wrong(format!("{name} has slots twice"), "write slots=N once");
            }
            ("slots", Ok(count)) if (1..=MOST).contains(&count) => slots = Some(count),
            ("slots", _) => {
                return wrong(
                    format!("slots={value} is not a number of ranks"),
                    "write a whole number, 1 or more",
                );
            }
            // Open MPI's limit on more ranks than slots, which there never are here.
            ("max_slots" | "max-slots", Ok(_)) => {}
            _ => {
                return wrong(
                    format!("{word:?} is not understood"),
                    "slots=N is all that may follow a host",
                );
            }
        }
    }
    Ok(Some((name, slots.unwrap_or(1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str, ranks: usize) -> Result<Vec<(String, usize)>, BadHostFile> {
        let all = ListedHost::of_file(text, ranks)?;
        Ok(all.into_iter().map(|host| (host.address().to_owned(), host.slots)).collect())
    }

    #[test]
    fn ranks_fill_the_slots_of_hosts_in_order() {
        let text = "# two hosts\n\nnode-a slots=2 max_slots=4\n  user@10.0.0.2\tslots=3 # the large one\nc\n";
        let listed = ["node-a", "10.0.0.2", "c"].map(str::to_owned).into_iter().zip([2, 3, 1]);
        assert_eq!(hosts(text, 4).unwrap(), listed.collect::<Vec<_>>());
        for (ranks, expected) in
            [(1, [0..1, 1..1, 1..1]), (4, [0..2, 2..4, 4..4]), (6, [0..2, 2..5, 5..6])]
        {
            assert_eq!(fill_slots([2, 3, 1], ranks), expected);
        }
    }

    #[test]
    fn what_is_wrong_has_its_line() {
        for (text, line, problem) in [
            ("", None, "no host is listed"),
            ("a\nb slots=2", None, "4 ranks need as many slots, and all hosts together have 3"),
            ("a slots=2\n\na slots=2", Some(3), "a is on line 1 already"),
            ("a\nb slots=x", Some(2), "slots=x is not a number of ranks"),
            ("a slots=0", Some(1), "slots=0 is not a number of ranks"),
            ("a slots=99999999999", Some(1), "slots=99999999999 is not"),
            ("a slots=1 slots=2", Some(1), "a has slots twice"),
            ("a slots = 4", Some(1), "\"slots\" is not understood"),
            ("a gpus=4", Some(1), "\"gpus=4\" is not understood"),
            ("-oProxyCommand=x slots=4", Some(1), "is not the name of a host"),
            ("a;reboot slots=4", Some(1), "is not the name of a host"),
            ("slots=4", Some(1), "is not the name of a host"),
        ] {
            let error = hosts(text, 4).unwrap_err();
            assert_eq!(error.line, line, "{text}");
            assert!(error.problem.contains(problem), "{text}: {}", error.problem);
            assert!(!error.fix.is_empty());
        }
    }

    #[test]
    fn a_host_of_slurm_has_its_ranks() {
        let share = |text: &str| {
            let get = |name: &str| {
                let mut pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
                pairs.find(|(own, _)| *own == name).map(|(_, value)| value.to_owned())
            };
            HostShare::of_slurm(&get, 4)
        };
        let step = "SLURM_PROCID=1 SLURM_NTASKS=3 SLURM_STEP_NUM_NODES=3 SLURM_STEP_ID=2 \
                    SLURM_STEP_NODELIST=n[1-3] SLURM_JOB_ID=77";
        let own = share(step).unwrap();
        assert_eq!((own.first, own.count, own.ranks), (4, 4, 12));
        assert_eq!(own.meet, ("n1".to_owned(), 20541));
        let given = share(&format!("{step} MASTER_ADDR=10.0.0.1 MASTER_PORT=7000")).unwrap();
        assert_eq!(given.meet, ("10.0.0.1".to_owned(), 7000));
        let error = share("SLURM_PROCID=1 SLURM_NTASKS=3").unwrap_err();
        assert!(error.problem.contains("SLURM_STEP_NUM_NODES is not set"), "{}", error.problem);
        let error = share(&step.replace("NTASKS=3", "NTASKS=6")).unwrap_err();
        assert!(error.fix.contains("--ntasks-per-node=1"), "{}", error.fix);
    }
}
