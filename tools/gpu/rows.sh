# The layouts that run.sh verifies on a GPU: every row is a comparison with one rank on the processor. Read by run.sh.

# Layouts that were added since a GPU was there: experts and their exchanges, rows packed by expert, learned noise,
# encoders and decoders, pipelines that do not drain, holders, blocks of operands that come one by one.
new_layouts() {
  # In 16 bits, tokens take all experts: two roundings may choose others.
  local few=(model.layers=2 train.batch_size=8) all=(model.layers=2 train.batch_size=8 model.experts=2) t5=(model.kind=t5 model.kv_heads=8 model.layers=2)
  PRESET=tiny-moe verify "dropless experts" model.capacity=0 "${few[@]}"
  PRESET=tiny-moe verify "dropless experts, tp 2" model.capacity=0 parallel.tp=2 "${few[@]}"
  PRESET=tiny-moe verify "dropless experts, dp 4, ep 2" model.capacity=0 parallel.dp=4 parallel.ep=2 "${few[@]}"
  PRESET=tiny-moe verify "dropless experts, bf16" model.capacity=0 precision.compute=bf16 precision.weights=bf16 "${all[@]}"
  PRESET=tiny-moe verify "dropless experts, f16" model.capacity=0 precision.compute=f16 precision.weights=f16 "${all[@]}"
  PRESET=tiny-moe verify "dropless experts, dp 2, ep 2, bf16" model.capacity=0 parallel.dp=2 parallel.ep=2 precision.compute=bf16 precision.weights=bf16 "${all[@]}"
  PRESET=tiny-moe verify "dropless experts, dp 2, ep 2, pp 2" model.capacity=0 parallel.dp=2 parallel.ep=2 parallel.pp=2 train.microbatches=2 "${few[@]}"
  PRESET=tiny-moe verify "GShard, dp 2, ep 2" model.router=gshard parallel.dp=2 parallel.ep=2 "${few[@]}"
  PRESET=tiny-moe verify "Switch, dp 2, ep 2" model.router=switch parallel.dp=2 parallel.ep=2 "${few[@]}"
  PRESET=tiny-moe verify "hierarchical exchange, dp 4, ep 4" parallel.dp=4 parallel.ep=4 parallel.expert_exchange=hierarchical "${few[@]}"
  PRESET=tiny-moe verify "coordinated exchange, dp 2, ep 2, tp 2" parallel.dp=2 parallel.ep=2 parallel.tp=2 parallel.expert_exchange=coordinated "${few[@]}"
  PRESET=tiny-moe verify "exchanges before reductions, dp 4, ep 2" parallel.dp=4 parallel.ep=2 parallel.comm_priority=lina "${few[@]}"
  PRESET=tiny-moe verify "noisy top-k" model.router=noisy "${few[@]}"
  PRESET=tiny-moe verify "noisy top-k, dp 4, ep 2" model.router=noisy parallel.dp=4 parallel.ep=2 "${few[@]}"
  PRESET=tiny-moe verify "pyramid of experts" model.late_experts=16 model.late_layers=1 model.residual_experts=true "${few[@]}"
  PRESET=tiny-moe verify "weights come to tokens, dp 4, ep 2" parallel.dp=4 parallel.ep=2 parallel.expert_exchange=weights "${few[@]}"
  verify "encoder and decoder" "${t5[@]}"
  verify "encoder and decoder, tp 2, sp" parallel.tp=2 parallel.sp=true "${t5[@]}"
  verify "encoder and decoder, pp 4" parallel.pp=4 train.microbatches=4 "${t5[@]}"
  for schedule in pipedream pipedream-2bw; do
    verify "pp 2, $schedule, steps in rows" parallel.pp=2 train.microbatches=4 model.layers=4 parallel.schedule=$schedule
    verify "encoder and decoder, pp 2, $schedule" parallel.pp=2 train.microbatches=4 parallel.schedule=$schedule "${t5[@]}"
  done
  for schedule in zb-auto v-half v-min; do
    verify "pp 4, $schedule" parallel.pp=4 train.microbatches=8 parallel.schedule=$schedule
  done
  verify "pp 2, PipeDream, holders 2-1" parallel.pp=2 parallel.holders=2-1 train.microbatches=4 model.layers=4 parallel.schedule=pipedream
  verify "pp 2, 1F1B, holders 2-1" parallel.pp=2 parallel.holders=2-1 train.microbatches=4 model.layers=4
  PRESET=mnist-cnn verify "convolutions, dp 2, ZeRO-3" train.batch_size=8 parallel.dp=2 parallel.zero=3
  verify "2D, tp 4, streamed" parallel.tp=4 parallel.tp_kind=2d parallel.stream=true
  verify "3D, tp 8, streamed" parallel.tp=8 parallel.tp_kind=3d parallel.stream=true
  verify "tp 2, sp, streamed" parallel.tp=2 parallel.sp=true parallel.stream=true
}

layouts() {
  verify "one rank"
  verify "tp 2" parallel.tp=2
  verify "tp 2, sp" parallel.tp=2 parallel.sp=true
  verify "cp 2" parallel.cp=2
  for zero in 1 2 3; do verify "dp 2, ZeRO-$zero" parallel.dp=2 parallel.zero=$zero; done
  for schedule in naive gpipe vectorised 1f1b interleaved breadth-first zb-h1 zb-h2 zb-v; do
    verify "pp 2, $schedule" parallel.pp=2 train.microbatches=4 model.layers=4 parallel.schedule=$schedule
  done
  verify "pp 2, vectorised, twice around, ZeRO-3" parallel.pp=2 parallel.chunks=2 parallel.dp=2 parallel.zero=3 train.microbatches=4 model.layers=4 parallel.schedule=vectorised
  verify "tp 2, dp 2, pp 2" parallel.tp=2 parallel.dp=2 parallel.pp=2 train.microbatches=4
  for order in block zigzag striped; do
    verify "ring attention, cp 4, $order" parallel.cp=4 parallel.cp_kind=ring parallel.cp_order=$order
  done
  verify "all-gather KV, cp 4" parallel.cp=4 parallel.cp_kind=allgather
  verify "all-gather KV, cp 4, zigzag" parallel.cp=4 parallel.cp_kind=allgather parallel.cp_order=zigzag
  verify "ring attention, cp 2, tp 2, pp 2" parallel.cp=2 parallel.cp_kind=ring parallel.tp=2 parallel.pp=2 train.microbatches=4
  verify "2D, tp 4" parallel.tp=4 parallel.tp_kind=2d
  verify "2.5D, tp 8" parallel.tp=8 parallel.tp_kind=2.5d parallel.tp_depth=2
  verify "3D, tp 8" parallel.tp=8 parallel.tp_kind=3d
  verify "local SGD, dp 2" parallel.dp=2 parallel.sync=local-sgd parallel.sync_every=2
  verify "local SGD, dp 2, tp 2, momenta kept" parallel.dp=2 parallel.tp=2 parallel.sync=local-sgd parallel.sync_every=2 parallel.sync_momentum=keep
  verify "averaging, dp 2, pp 2" parallel.dp=2 parallel.pp=2 parallel.sync=average parallel.sync_every=0 train.microbatches=4
  verify "DataParallel, dp 2" parallel.dp=2 parallel.sync=dataparallel
  verify "DataParallel, dp 2, tp 2, lamb" parallel.dp=2 parallel.tp=2 parallel.sync=dataparallel optim.kind=lamb
  verify "Ring Self-Attention, cp 2" parallel.cp=2 parallel.cp_kind=rsa
  for schedule in dualpipe chimera bpipe pipedream pipedream-2bw; do
    verify "pp 4, $schedule" parallel.pp=4 train.microbatches=8 model.layers=4 parallel.schedule=$schedule
  done
  PRESET=tiny-moe verify "experts"
  PRESET=tiny-moe verify "experts, tp 2" parallel.tp=2
  PRESET=tiny-moe verify "experts, dp 4, ep 2" parallel.dp=4 parallel.ep=2
  PRESET=mnist-cnn verify "convolutions" train.batch_size=8
  PRESET=mnist-cnn verify "convolutions, tp 2" train.batch_size=8 parallel.tp=2
  PRESET=mnist-cnn verify "convolutions, heights on 4 ranks" train.batch_size=8 parallel.tp=4 parallel.sp=true
  PRESET=mnist-cnn verify "convolutions, uneven heights on 3 ranks, features" train.batch_size=8 parallel.tp=3 parallel.sp=true 'parallel.tp_plan=["fc1.* columns","fc2.weight rows"]'
  verify "2D, tp 16, streamed" parallel.tp=16 parallel.tp_kind=2d parallel.stream=true
  verify "2.5D, tp 8, streamed" parallel.tp=8 parallel.tp_kind=2.5d parallel.tp_depth=2 parallel.stream=true
  verify "2D, tp 4, ZeRO-3, ring, recomputation" parallel.tp=4 parallel.tp_kind=2d parallel.dp=2 parallel.zero=3 parallel.cp=2 parallel.cp_kind=ring train.recompute=full
  verify "GSPMD's 2-D recipe, tp 4" parallel.tp=4 parallel.tp_kind=gspmd
  verify "GSPMD's 2-D recipe, tp 8, 4 rows, streamed" parallel.tp=8 parallel.tp_kind=gspmd parallel.tp_rows=4 parallel.stream=true
  verify "pp 2, zb-h2, post-validation" parallel.pp=2 train.microbatches=4 model.layers=4 parallel.schedule=zb-h2 parallel.post_validation=true
  verify "adafactor, tp 2, ZeRO-2" parallel.tp=2 parallel.dp=2 parallel.zero=2 optim.kind=adafactor
  for kind in adamw adam sgd lion lamb; do
    verify "$kind, tp 2, ZeRO-2" parallel.tp=2 parallel.dp=2 parallel.zero=2 optim.kind=$kind
  done
  for layout in "" parallel.tp=2 parallel.dp=2,parallel.zero=3 parallel.cp=2,parallel.cp_kind=ring parallel.cp=2,parallel.cp_kind=rsa parallel.pp=2,train.microbatches=4 parallel.tp=4,parallel.tp_kind=2d,parallel.stream=true parallel.dp=2,parallel.sync=dataparallel precision.initial_scale_power=24,precision.hysteresis=1,parallel.dp=2; do
    verify "f16 ${layout:-one rank}" precision.compute=f16 precision.weights=f16 ${layout//,/ }
  done
  for layout in "" parallel.tp=2,parallel.dp=2,parallel.zero=2 parallel.pp=2,train.microbatches=4; do
    verify "bf16, split masters ${layout:-one rank}" precision.compute=bf16 precision.weights=bf16 precision.masters=split ${layout//,/ }
    verify "bf16, residual stream of f32 ${layout:-one rank}" precision.compute=bf16 precision.weights=bf16 precision.residual=f32 ${layout//,/ }
  done
  verify "tf32, tp 2" precision.compute=f32 precision.tf32=true parallel.tp=2
  for layout in parallel.tp=2 parallel.dp=2,parallel.zero=3 parallel.pp=2,train.microbatches=4; do
    PROCESSES=2 verify "two processes, $layout" ${layout//,/ }
  done
}
