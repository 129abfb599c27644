//! A layout in one line.

use phalanx_ir::Mesh;

use super::Lowered;

impl Lowered {
    /// The ranks and how they divide the work, in one line.
    pub fn describe(&self) -> String {
        let (parallel, sharing) = (&self.settings.parallel, self.on_mesh[0].partition.sharing());
        let ranks = self.ranks();
        let told = self.groups.len() > 1 || !parallel.pipeline.is_usual();
        let pipeline = told.then(|| parallel.pipeline.name().to_owned());
        if ranks == 1 {
            return pipeline.map_or("1 rank".to_owned(), |name| format!("1 rank: {name}"));
        }
        let degrees = |mesh: &Mesh| -> String {
            let degrees: Vec<String> =
                mesh.axes().map(|(axis, size)| format!("{axis} {size}")).collect();
            degrees.join(" · ")
        };
        let stage_groups = match (&parallel.pipeline.meshes[..], self.groups.len()) {
            ([], _) if self.replicas() > 1 => degrees(&parallel.mesh),
            ([], 1) => degrees(self.mesh()),
            ([], stage_groups) => [format!("pp {stage_groups}"), degrees(self.mesh())]
                .into_iter()
                .filter(|part| !part.is_empty())
                .collect::<Vec<_>>()
                .join(" · "),
            (meshes, _) => {
                let each: Vec<String> =
                    meshes.iter().map(|m| format!("({})", degrees(m))).collect();
                each.join(" → ")
            }
        };
        let names: Vec<String> =
            (parallel.strategies.iter().map(|s| s.name().to_owned())).chain(pipeline).collect();
        let facts = sharing.facts();
        let kept = [
            ("weights", facts.weights),
            ("gradients", facts.gradient),
            ("optimizer state", facts.state),
        ];
        let kept = kept.into_iter().filter(|(_, kept)| kept.is_shard()).map(|(what, _)| what);
        let kept: Vec<&str> = kept.collect();
        let shards = kept.split_last().map(|(last, others)| {
            let what = match others {
                [] => (*last).to_owned(),
                others => format!("{} and {last}", others.join(", ")),
            };
            let axes: Vec<String> = facts.axes.iter().map(ToString::to_string).collect();
            format!("; {what} in shards over {}", axes.join(" · "))
        });
        let shards = shards.unwrap_or_default();
        let replicas = parallel.replicas.map(|replicas| replicas.describe());
        let names: Vec<String> = replicas.into_iter().chain(names).collect();
        format!("{ranks} ranks, {stage_groups}: {}{shards}", names.join(", "))
    }
}
