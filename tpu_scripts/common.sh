# Sourced by the scripts of this folder: messages, quoting, dry runs, and where a TPU is.
# shellcheck shell=bash

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "${0##*/} must run in bash 4.4 or newer; got $BASH_VERSION. Run it with a newer one." >&2
  exit 2
fi
shopt -s inherit_errexit # set -e also applies inside $(...)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=
exec 3>&1 # a dry run prints here, also from inside $(...)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# Ends the script with exit code 2, for input that cannot be used.
die() {
  say "$*"
  exit 2
}

# Prints the comment that heads the script.
show_help() {
  awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
  exit 0
}

# Prints words, quoted so that a shell reads the same words.
quoted() {
  local words
  printf -v words '%q ' "$@"
  printf '%s' "${words% }"
}

# Runs a command; a dry run prints it instead, and goes on as if it had succeeded and printed nothing.
act() {
  if [ -n "$dry_run" ]; then
    printf '%s\n' "$(quoted "$@")" >&3
  else
    "$@"
  fi
}

# Refuses to go on while a variable is empty: need NAME MEANING [NAME MEANING ...].
need() {
  while [ $# -gt 0 ]; do
    [ -n "${!1:-}" ] || die "$1 must be the $2; got nothing. Set it in the environment (docs/launching.md lists all)."
    shift 2
  done
}

# Refuses a value that is not a whole number of at least 1, before arithmetic runs what is in it: need_count NAME [MOST].
need_count() {
  [[ ${!1} =~ ^[1-9][0-9]{0,17}$ && ${!1} -le ${2:-999999999999999999} ]] ||
    die "$1 must be a whole number of at least 1${2:+ and at most $2}; got '${!1}'. Set it to 2, say."
}

# A run's name becomes part of file names on every worker.
need_run_name() {
  [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    die "A run's name must be letters, digits, '.', '_' and '-'; got '$1'. Give another with --run."
}

# A TPU's name is an argument of gcloud; if it began with '-', it would be read as an option.
need_tpu_name() {
  local rule="be letters, digits and '-', and begin with no '-'"
  [[ $JAXCOMM_TPU_NAME =~ ^[A-Za-z0-9][A-Za-z0-9-]*$ ]] ||
    die "JAXCOMM_TPU_NAME must $rule; got '$JAXCOMM_TPU_NAME'. Choose another."
}

# A folder on the workers is part of remote commands and of scp's destination, which quote differently.
need_folder() {
  [[ ${!1} =~ ^[A-Za-z0-9._/-]+$ && ${!1} != -* ]] ||
    die "$1 must be a path of letters, digits, '.', '_', '/' and '-'; got '${!1}'. Choose another."
}

# Sets `file` to a new, empty file that nobody else could have made, and removes it when the script ends. A dry run
# creates no file, and shows mktemp's template.
make_file() {
  file=${TMPDIR:-/tmp}/jaxcomm.XXXXXXXXXX
  [ -z "$dry_run" ] || return 0
  file=$(mktemp -- "$file")
  trap 'rm -f -- "$file"' EXIT
}

# Makes an archive of the working tree: tracked files, and new ones that git does not ignore. tar warns about tracked
# files that are gone.
pack() {
  local list=(git -C "$root" ls-files -z --cached --others --exclude-standard --deduplicate)
  local create=(tar -C "$root" --null --files-from=- --ignore-failed-read -czf "$1")
  if [ -n "$dry_run" ]; then
    printf '%s | %s\n' "$(quoted "${list[@]}")" "$(quoted "${create[@]}")" >&3
  else
    "${list[@]}" | "${create[@]}"
  fi
}

# Reads where the TPU is from the environment. `tpu` is gcloud's group of commands for it: one slice is a TPU VM,
# several are a queued resource, which starts all of them together and tells each its number.
find_tpu() {
  need JAXCOMM_TPU_NAME "TPU's name" JAXCOMM_TPU_PROJECT "Google Cloud project" JAXCOMM_TPU_ZONE "TPU's zone"
  need_tpu_name
  : "${JAXCOMM_TPU_SLICES:=1}" "${JAXCOMM_FOLDER:=jaxcomm}"
  need_count JAXCOMM_TPU_SLICES
  need_folder JAXCOMM_FOLDER
  where=(--project="$JAXCOMM_TPU_PROJECT" --zone="$JAXCOMM_TPU_ZONE")
  if [ "$JAXCOMM_TPU_SLICES" = 1 ]; then
    tpu=(gcloud compute tpus tpu-vm)
    state='state'
  else
    tpu=(gcloud compute tpus queued-resources)
    state='state.state'
  fi
}

# Prints the TPU's state, or nothing if there is no TPU of its name.
tpu_state() {
  local rows
  # Without the TPU, `list` prints nothing where `describe` would fail: so a failure is a real one.
  rows=$(act "${tpu[@]}" list "${where[@]}" --format="value(name.basename(),$state)")
  awk -v name="$JAXCOMM_TPU_NAME" '$1 == name { print $2 }' <<<"$rows"
}

# Prints the options that choose workers: all of them, or "first".
workers_of() {
  local which=all
  [ "$1" = first ] && which=0
  [ "$JAXCOMM_TPU_SLICES" = 1 ] || printf '%s\n' "--node=$which"
  printf '%s\n' "--worker=$which"
  [ -z "${JAXCOMM_TPU_INTERNAL_IP:-}" ] || printf '%s\n' --internal-ip
}

# Runs a command line on workers: on_workers all|first COMMAND_LINE.
on_workers() {
  local options
  mapfile -t options < <(workers_of "$1")
  act "${tpu[@]}" ssh "$JAXCOMM_TPU_NAME" "${where[@]}" "${options[@]}" --quiet --command="$2"
}

# Copies a file to all workers, to a path below their home: copy_to_workers FILE PATH.
copy_to_workers() {
  local options
  mapfile -t options < <(workers_of all)
  act "${tpu[@]}" scp "$1" "$JAXCOMM_TPU_NAME:$2" "${where[@]}" "${options[@]}" --quiet
}

# Prints the command line that runs `worker` in the folder on a machine: worker_command WORD...
worker_command() { printf 'cd %s && %s' "$(quoted "$JAXCOMM_FOLDER")" "$(quoted tpu_scripts/worker "$@")"; }

# Never asks for a password, and notices within a minute that a host is gone.
# shellcheck disable=SC2034  # ssh_setup and ssh_run use it
ssh_options=(-o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4)

# Reads a file of hosts: sets `hosts`, in ssh's form, and `coordinator`, the address of the first.
read_hosts() {
  local line words number=0
  [ -r "$1" ] || die "The file of hosts must be one that can be read; got '$1'."
  hosts=()
  coordinator=
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    read -ra words <<<"${line%%#*}"
    case ${#words[@]} in
      0) continue ;;
      1 | 2) ;;
      *) die "Line $number of $1 must be a host and the first one's address; got '$line'." ;;
    esac
    [[ ${words[0]} =~ ^[A-Za-z0-9_][A-Za-z0-9_.@-]*$ ]] ||
      die "Line $number of $1 must be a host as ssh takes it; got '${words[0]}'."
    if [ ${#words[@]} = 2 ] && [ ${#hosts[@]} -gt 0 ]; then
      die "Only the first host of $1 must have an address; got one on line $number."
    fi
    [ -n "$coordinator" ] || coordinator=${words[1]:-${words[0]#*@}}
    hosts+=("${words[0]}")
  done <"$1"
  [ ${#hosts[@]} -gt 0 ] || die "$1 must name a host; got none. Write one on each line."
}
