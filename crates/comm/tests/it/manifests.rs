//! The manifest for Kubernetes: it is YAML, and its variables make the ranks of a job.

use phalanx_comm::{Environment, MeetingPoint};
use yaml_rust2::{Yaml, YamlLoader};

const TEXT: &str = include_str!("../../../../docs/kubernetes.yaml");

/// The only document of a kind.
fn of_kind<'a>(all: &'a [Yaml], kind: &str) -> &'a Yaml {
    all.iter().find(|one| one["kind"].as_str() == Some(kind)).unwrap()
}

fn strings<'a>(one: &'a Yaml, path: &[&str]) -> &'a str {
    path.iter().fold(one, |one, name| &one[*name]).as_str().unwrap()
}

#[test]
fn a_kubernetes_job_has_the_variables_of_its_ranks() {
    let all = YamlLoader::load_from_str(TEXT).unwrap();
    let (service, secret, job) =
        (of_kind(&all, "Service"), of_kind(&all, "Secret"), of_kind(&all, "Job"));
    let spec = &job["spec"];
    assert_eq!(spec["completionMode"].as_str(), Some("Indexed"));
    let ranks = spec["completions"].as_i64().unwrap();
    assert_eq!(spec["parallelism"].as_i64(), Some(ranks), "all ranks must run at once");
    let pod = &spec["template"]["spec"];
    let container = &pod["containers"][0];
    for rank in 0..ranks as usize {
        let get = |name: &str| {
            let mut variables = container["env"].as_vec().unwrap().iter();
            let own = variables.find(|own| own["name"].as_str() == Some(name))?;
            if let Some(value) = own["value"].as_str() {
                return Some(value.to_owned());
            }
            let from = &own["valueFrom"];
            if let Some(path) = from["fieldRef"]["fieldPath"].as_str() {
                let index = "metadata.annotations['batch.kubernetes.io/job-completion-index']";
                return (path == index).then(|| rank.to_string());
            }
            let key = &from["secretKeyRef"];
            assert_eq!(key["name"].as_str().unwrap(), strings(secret, &["metadata", "name"]));
            Some(strings(secret, &["stringData", key["key"].as_str().unwrap()]).to_owned())
        };
        let found = Environment::find(&get).unwrap().unwrap();
        assert_eq!((found.rank, found.ranks), (rank, ranks as usize));
        // The service gives the first pod its name.
        let name = strings(service, &["metadata", "name"]);
        assert_eq!(strings(pod, &["subdomain"]), name);
        let first = format!("{}-0.{name}", strings(job, &["metadata", "name"]));
        let port = service["spec"]["ports"][0]["port"].as_i64().unwrap() as u16;
        assert_eq!(found.meet, MeetingPoint::Host { host: first, ports: vec![port] });
        assert!(get("PHALANX_TOKEN").is_some());
    }
    assert_eq!(strings(service, &["spec", "clusterIP"]), "None");
    assert_eq!(service["spec"]["publishNotReadyAddresses"].as_bool(), Some(true));
    let label = strings(service, &["spec", "selector", "job-name"]);
    assert_eq!(strings(&spec["template"], &["metadata", "labels", "job-name"]), label);
    // What it runs has as many ranks as there are pods.
    let words: Vec<&str> =
        container["command"].as_vec().unwrap().iter().filter_map(Yaml::as_str).collect();
    assert!(words.contains(&"run.ranks=env") && words.contains(&"parallel.dp=4") && ranks == 4);
}
