members=(
@members@
)
read -r experiment seed <<< "${members[$SLURM_ARRAY_TASK_ID]}"

@command@ --no-baseline --seeds="$seed-$seed" -- "$experiment" &
child=$!

# SLURM sends USR1 some time before the limit: the run saves, and the job is queued again; it continues where it was.
# TERM means cancelled or preempted: the run saves, and it is SLURM that queues a preempted job again.
again=no
woken=yes
trap 'again=yes; woken=yes; kill -TERM "$child"' USR1
trap 'woken=yes; kill -TERM "$child"' TERM INT
while [ "$woken" = yes ]; do
  woken=no
  wait "$child"
  now=$?
  [ "$now" -eq 127 ] || code=$now
done

# 75: stopped and saved.
if [ "$again" = yes ] && [ "$code" -eq 75 ]; then
  echo "near the time limit: saved, queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
