//! smoke
use phalanx_comm::*;
#[test]
fn smoke() {
    for n in 1..=5 {
        let out = run_ranks(n, &Options::default(), |e| {
            let mut x = vec![e.rank() as f32 + 1.0; 100];
            for _ in 0..100 {
                e.all_reduce(GroupId::WORLD, Reduction::Max, &mut x)?;
            }
            let mut y = vec![e.rank() as f32 + 1.0; 101];
            e.all_reduce(GroupId::WORLD, Reduction::Sum, &mut y)?;
            Ok::<_, CommError>(y[100] + x[3])
        })
        .unwrap();
        assert_eq!(out, vec![(n * (n + 1) / 2 + n) as f32; n]);
    }
}
