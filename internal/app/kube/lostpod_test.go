package kube_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A worker tells of its world, and ends when it is told to.
const worker = `
import os, sys, time
folder = os.environ["PLAY"]
with open(f"{folder}/worlds", "a") as f:
    f.write(f"{os.environ['WORLD_SIZE']} {os.environ['POD_NAME']}\n")
while not os.path.exists(folder + "/end"):
    time.sleep(0.02)
with open(folder + "/end") as f:
    sys.exit(int(f.read()))
`

// play is a job under Kubernetes' own controller of Jobs, whose pods are launchers on this machine.
type play struct {
	t       *testing.T
	a       *admin
	job     string
	dir     string
	launch  string // the program
	master  string // its address
	kubelet map[string]*container
	// controller makes the pods; nil: Kubernetes' own does.
	controller *controller
}

// container is that of a pod which the kubelet of the test runs.
type container struct {
	pod      pod
	process  *process
	restarts int
}

// pod is what a kubelet reads of a pod.
type pod struct {
	Metadata struct {
		Name, UID   string
		Annotations map[string]string
		Deletion    string `json:"deletionTimestamp"`
	}
	Spec struct {
		RestartPolicy string
		Containers    []struct {
			Name          string
			Command, Args []string
			Env           []struct {
				Name, Value string
				ValueFrom   struct {
					FieldRef struct{ FieldPath string }
				}
			}
			RestartPolicyRules []struct {
				ExitCodes struct{ Values []int }
			}
		}
	}
	Status struct {
		Phase             string
		ContainerStatuses []struct {
			State struct {
				Terminated struct{ ExitCode int }
			}
		}
	}
}

func (p pod) index() string {
	return p.Metadata.Annotations["batch.kubernetes.io/job-completion-index"]
}

func (p *play) pods() (pods []pod) {
	var list struct{ Items []pod }
	p.a.want("GET", "/api/v1/namespaces/default/pods?labelSelector=batch.kubernetes.io/job-name="+p.job, "", nil, &list)
	return list.Items
}

// sync does for all pods of the job what kubelets do.
func (p *play) sync() {
	if p.controller != nil {
		p.controller.sync(p)
	}
	seen := map[string]bool{}
	for _, pod := range p.pods() {
		uid := pod.Metadata.UID
		seen[uid] = true
		c := p.kubelet[uid]
		switch {
		case pod.Status.Phase == "Failed" || pod.Status.Phase == "Succeeded":
		case pod.Metadata.Deletion != "":
			if c != nil {
				c.process.end()
			}
			p.a.want("DELETE", podPath+pod.Metadata.Name+"?gracePeriodSeconds=0", "", nil, nil)
		case c == nil:
			p.a.want("POST", podPath+pod.Metadata.Name+"/binding", "application/json", object{
				"apiVersion": "v1", "kind": "Binding", "metadata": object{"name": pod.Metadata.Name},
				"target": object{"kind": "Node", "name": "node-" + pod.index()}}, nil)
			c = &container{pod: pod}
			p.kubelet[uid] = c
			p.start(c)
		default:
			p.look(c)
		}
	}
	for uid, c := range p.kubelet {
		if !seen[uid] {
			c.process.end()
		}
	}
}

const podPath = "/api/v1/namespaces/default/pods/"

// look starts a container that has ended again if a rule says so.
func (p *play) look(c *container) {
	select {
	case <-c.process.ended:
	default:
		return
	}
	code := c.process.wait.ExitStatus()
	if c.process.wait.Signaled() {
		code = 128 + int(c.process.wait.Signal())
	}
	again := c.pod.Spec.RestartPolicy == "Always"
	for _, rule := range c.pod.Spec.Containers[0].RestartPolicyRules {
		again = again || slices.Contains(rule.ExitCodes.Values, code)
	}
	if again {
		c.restarts++
		p.start(c)
		return
	}
	phase := "Failed"
	if code == 0 {
		phase = "Succeeded"
	}
	p.status(c, phase, terminated(code))
}

func terminated(code int) object {
	return object{"terminated": object{"exitCode": code, "finishedAt": now()}}
}

func now() string { return time.Now().UTC().Format(time.RFC3339) }

func (p *play) status(c *container, phase string, state object, conditions ...object) {
	p.a.want("PATCH", podPath+c.pod.Metadata.Name+"/status", "application/strategic-merge-patch+json",
		object{"status": object{"phase": phase, "conditions": conditions, "containerStatuses": []object{{
			"name": c.pod.Spec.Containers[0].Name, "image": "training", "imageID": "", "ready": phase == "Running",
			"restartCount": c.restarts,
			"state":        state}}}}, nil)
}

// start runs a container's program with its arguments and variables.
func (p *play) start(c *container) {
	fields := map[string]string{
		"metadata.name": c.pod.Metadata.Name, "spec.nodeName": "node-" + c.pod.index(), "status.podIP": "127.0.0.1",
		"metadata.labels['batch.kubernetes.io/job-completion-index']": c.pod.index(),
		"metadata.labels['jobset.sigs.k8s.io/jobset-name']":           p.job,
	}
	of := c.pod.Spec.Containers[0]
	// The PET variables are what Kubeflow's Trainer gives its pods.
	args := []string{"PLAY=" + p.dir, p.path()}
	if p.job == "trainjob" {
		args = append(args, "PET_NNODES=3", "PET_NPROC_PER_NODE=1", "PET_NODE_RANK="+c.pod.index(),
			"PET_MASTER_ADDR=train-node-0-0.train", "PET_MASTER_PORT=29400")
	}
	for _, v := range of.Env {
		value := v.Value
		if path := v.ValueFrom.FieldRef.FieldPath; path != "" {
			value = fields[path]
			require.NotEmpty(p.t, value, path)
		}
		switch v.Name {
		case "DLROVER_MASTER_ADDR": // which only DNS of a cluster knows
			value = p.master
		case "DLROVER_TOKEN_FILE": // the volume of the Secret
			value = filepath.Join(p.dir, "token")
		}
		args = append(args, v.Name+"="+value)
	}
	for i, arg := range of.Args {
		of.Args[i] = strings.ReplaceAll(arg, "$(JOB_NAME)", p.job)
	}
	dir, err := os.MkdirTemp(p.dir, "container")
	require.NoError(p.t, err)
	c.process = spawn(p.t, dir, "/usr/bin/env", slices.Concat(args, of.Command, of.Args)...)
	p.status(c, "Running", object{"running": object{"startedAt": now()}})
}

// until syncs until it is so.
func (p *play) until(what string, so func() bool) {
	p.t.Helper()
	if eventually(func() bool { p.sync(); return so() }) {
		return
	}
	for _, c := range p.kubelet {
		p.t.Log(c.pod.Metadata.Name, c.process.tail())
	}
	p.t.Fatal(what)
}

// world returns whether the last nodes that began a world of that size are those of all pods that run.
func (p *play) world(size int) bool {
	text, err := os.ReadFile(filepath.Join(p.dir, "worlds"))
	if err != nil {
		return false
	}
	lines := strings.Fields(strings.ReplaceAll(string(text), " ", "/"))
	var want []string
	for _, c := range p.running() {
		want = append(want, fmt.Sprintf("%d/%s", size, c.pod.Metadata.Name))
	}
	return len(want) == size && len(lines) >= size &&
		slices.Equal(slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(lines[len(lines)-size:])))
}

// running are the containers of pods that have not ended, by index.
func (p *play) running() map[string]*container {
	running := map[string]*container{}
	for _, pod := range p.pods() {
		if c := p.kubelet[pod.Metadata.UID]; c != nil && pod.Status.Phase == "Running" {
			running[pod.index()] = c
		}
	}
	return running
}

// state says which containers run, and in which processes.
func (p *play) state(indices ...string) (state []string) {
	running := p.running()
	for _, i := range indices {
		c := running[i]
		require.NotNil(p.t, c, i)
		state = append(state, fmt.Sprint(c.pod.Metadata.UID, c.restarts, c.process.of.Pid))
	}
	return state
}

// ended returns the condition with which Kubernetes has ended the job, "" before.
func (p *play) ended() string {
	var job struct {
		Status struct {
			Conditions []struct{ Type, Status, Reason string }
		}
	}
	p.a.want("GET", "/apis/batch/v1/namespaces/default/jobs/"+p.job, "", nil, &job)
	for _, c := range job.Status.Conditions {
		if c.Status == "True" && (c.Type == "Complete" || c.Type == "Failed") {
			return c.Type + " " + c.Reason
		}
	}
	return ""
}

func (p *play) end(code string) {
	write(p.t, filepath.Join(p.dir, "end"), code)
}

// testLostPod: under Kubernetes' own controller of Jobs a lost pod costs one pod, and a killed launcher none.
func (k real) testLostPod(t *testing.T) {
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", dir, "../../../cmd/dlrover-master", "../../../cmd/dlrover-run")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	k.startManager(t, dir)
	for _, name := range []string{"training-pod.yaml", "jobset.yaml", "trainjob.yaml"} {
		t.Run(name, func(t *testing.T) {
			p := k.play(t, dir, name, strings.TrimSuffix(name, ".yaml"))
			p.until("a world of three", func() bool { return p.world(3) })

			others := p.state("0", "2")
			p.lose("1")
			p.until("a world of the others", func() bool { return p.world(2) })
			require.Equal(t, others, p.state("0", "2"))
			began := time.Now()
			p.until("a world of three, one new", func() bool { return p.world(3) })
			t.Logf("a new pod after %s", time.Since(began).Round(time.Millisecond))
			require.Equal(t, others, p.state("0", "2"), "two pods of three stay")
			require.Len(t, p.kubelet, 4)

			others, first := p.state("1", "2"), p.running()["0"]
			first.process.kill()
			p.until("the launcher again", func() bool { return first.restarts == 1 && p.world(3) })
			require.Equal(t, others, p.state("1", "2"))
			require.Len(t, p.kubelet, 4, "no new pod")

			p.end("0")
			p.until("the end of the job", func() bool { return p.ended() != "" })
			require.Contains(t, p.ended(), "Complete")
			require.Len(t, p.kubelet, 4)
		})
	}
	k.testOtherJobs(t, dir)
	t.Run("Permanent", func(t *testing.T) {
		p := k.play(t, dir, "training-pod.yaml", "permanent")
		p.until("a world of three", func() bool { return p.world(3) })
		p.end("3") // at each restart, too
		p.until("the end of the job", func() bool { return p.ended() != "" })
		require.Equal(t, "Failed PodFailurePolicy", p.ended())
		require.Len(t, p.kubelet, 3)
	})
}

// play creates the Job of a manifest.
func (k real) play(t *testing.T, programs, name, as string) *play {
	p, doc := k.prepare(t, programs, name, as)
	job := parsed(t, doc)
	if job["kind"] != "Job" {
		jobs := slices.DeleteFunc(builtin(job), func(o object) bool { return o["kind"] != "Job" })
		require.Len(t, jobs, 1)
		job = jobs[0]
	}
	job["metadata"] = object{"name": as}
	job["spec"].(object)["completions"], job["spec"].(object)["parallelism"] = 3, 3
	code, answer := p.a.post(text(t, job), "")
	require.Equal(t, http.StatusCreated, code, "%s", answer)
	return p
}

// prepare starts a master, and returns a manifest for three nodes and a script of the test.
func (k real) prepare(t *testing.T, programs, name, as string) (*play, string) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "worker.py"), worker)
	write(t, filepath.Join(dir, "token"), "of-the-job-of-the-job")
	address := "127.0.0.1:" + freePort(t)
	master := spawn(t, dir, filepath.Join(programs, "dlrover-master"), "--listen="+address,
		"--token-file="+filepath.Join(dir, "token"))
	require.True(t, eventually(func() bool { return strings.Contains(master.tail(), address) }))
	p := &play{t: t, a: newAdmin(t, k.root), job: as, dir: dir, launch: filepath.Join(programs, "dlrover-run"),
		master: address, kubelet: map[string]*container{}}
	doc := strings.NewReplacer("train.py", filepath.Join(dir, "worker.py"), "=gpu", "=1", "--nnodes=2\n", "--nnodes=2:3\n",
		"--nnodes=3:4", "--nnodes=2:3").Replace(manifest(t, name))
	return p, doc
}

// lose is the end of a pod's node: its processes are gone, and Kubernetes declares the pod failed.
func (p *play) lose(index string) {
	c := p.running()[index]
	c.process.kill()
	<-c.process.ended
	p.status(c, "Failed", terminated(137),
		object{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"})
}

// startManager starts the controllers of Jobs, and of the account that pods have, of the API server's version.
func (k real) startManager(t *testing.T, dir string) {
	program := strings.Replace(os.Getenv(apiServerVariable), "kube-apiserver", "kube-controller-manager", 1)
	manager := spawn(t, dir, program, "--kubeconfig="+k.kubeconfig(t), "--controllers=job,serviceaccount",
		"--leader-elect=false", "--secure-port=0")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(manager.tail())
		}
	})
}
