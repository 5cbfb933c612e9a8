#!/bin/sh
#SBATCH --job-name=headway-s-job1-1
#SBATCH --output=FOLDER/s/jobs/job1/1/out
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --no-requeue
#SBATCH --gres=gpu:a100:1
#SBATCH --open-mode=append
cd FOLDER/s/jobs/job1/1 || exit 1
[ "$(cat ../newest)" = 1 ] || exit 0
export HEADWAY_SAVES=FOLDER/s/jobs/job1/1/saves HEADWAY_SLOTS=a100:0
trap '[ -z "$asked" ] && [ -n "$child" ] && asked=1 && : >asked && kill -TERM $child' TERM
trap : INT HUP
(cd / && exec PY -m headway run --quiet --grace-s 30 --out FOLDER/s/jobs/job1/1/run -- train.py) </dev/null &
child=$!
echo $$ $child >pid.new && mv pid.new pid
while :; do
    wait $child; code=$?
    kill -0 $child 2>/dev/null || break
done
echo $code >exit.new && mv exit.new exit
exit $code
