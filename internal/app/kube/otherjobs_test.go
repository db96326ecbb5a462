package kube_test

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// otherJob is a kind of job whose controller does not run here. The test makes its pods, and does with one that has
// failed what the kind's documentation says.
type otherJob struct {
	manifest string
	policy   string                               // restartPolicy that the kind gives its pods; "": that of the manifest
	ends     func(manifest object, code int) bool // a pod that has ended so ends the job; nil: pods do not end
	back     bool                                 // a killed launcher comes back in its pod
}

var otherJobs = []otherJob{
	{"pytorchjob.yaml", "Never", func(_ object, code int) bool { return code < 128 }, false},
	{"volcano-job.yaml", "", terminates, true},
	{"leaderworkerset.yaml", "", nil, true},
}

// terminates reports whether a policy of a job of Volcano ends it at that exit code.
func terminates(job object, code int) bool {
	task := job["spec"].(object)["tasks"].([]any)[0].(object)
	for _, p := range task["policies"].([]any) {
		if p := p.(object); p["exitCode"] == code {
			return p["action"] == "TerminateJob"
		}
	}
	return false
}

// controller is that of an otherJob.
type controller struct {
	otherJob
	parsed   object
	template object
	made     int // pods
	ended    bool
}

// sync makes the pods that are missing.
func (c *controller) sync(p *play) {
	have := map[string]bool{}
	for _, pod := range p.pods() {
		if pod.Status.Phase != "Failed" {
			have[pod.index()] = true
			continue
		}
		code := pod.Status.ContainerStatuses[0].State.Terminated.ExitCode
		c.ended = c.ended || c.ends != nil && c.ends(c.parsed, code)
		p.a.want("DELETE", podPath+pod.Metadata.Name+"?gracePeriodSeconds=0", "", nil, nil)
	}
	for i := range 3 {
		if index := fmt.Sprint(i); !have[index] && !c.ended {
			c.make(p, index)
		}
	}
}

func (c *controller) make(p *play, index string) {
	p.t.Helper()
	c.made++
	spec := c.template["spec"].(object)
	if c.policy != "" {
		spec["restartPolicy"] = c.policy
	}
	code, answer := p.a.post(text(p.t, object{"apiVersion": "v1", "kind": "Pod", "spec": spec, "metadata": object{
		"name":        fmt.Sprintf("%s-%s-%d", p.job, index, c.made),
		"labels":      object{"batch.kubernetes.io/job-name": p.job},
		"annotations": object{"batch.kubernetes.io/job-completion-index": index},
	}}), "")
	require.Equal(p.t, http.StatusCreated, code, "%s", answer)
}

// playOther is play for a job of another kind.
func (k real) playOther(t *testing.T, programs string, job otherJob, as string) *play {
	p, doc := k.prepare(t, programs, job.manifest, as)
	all := builtin(parsed(t, doc))
	require.NotEmpty(t, all)
	p.controller = &controller{otherJob: job, parsed: parsed(t, doc), template: all[0]["template"].(object)}
	return p
}

// testOtherJobs: with what their manifests say, a lost pod costs one pod, and a failure for good ends the job.
func (k real) testOtherJobs(t *testing.T, programs string) {
	for _, job := range otherJobs {
		as := strings.TrimSuffix(job.manifest, ".yaml")
		t.Run(job.manifest, func(t *testing.T) {
			p := k.playOther(t, programs, job, as)
			p.until("a world of three", func() bool { return p.world(3) })
			others := p.state("0", "2")
			p.lose("1")
			p.until("a world of three, one new", func() bool { return p.controller.made == 4 && p.world(3) })
			require.Equal(t, others, p.state("0", "2"), "two pods of three stay")

			others, first := p.state("1", "2"), p.running()["0"]
			first.process.kill()
			if job.back {
				p.until("the launcher again", func() bool { return first.restarts == 1 && p.world(3) })
				require.Equal(t, 4, p.controller.made)
			} else {
				p.until("another pod", func() bool { return p.controller.made == 5 && p.world(3) })
			}
			require.Equal(t, others, p.state("1", "2"))

			p.end("0")
			p.until("the end of the launchers", func() bool { return p.over("0") })
			require.False(t, p.controller.ended)
		})
		t.Run(job.manifest+" for good", func(t *testing.T) {
			p := k.playOther(t, programs, job, as+"-for-good")
			p.until("a world of three", func() bool { return p.world(3) })
			p.end("3") // at each restart, too
			p.until("the end of the job", func() bool {
				return p.controller.ended || job.ends == nil && p.over("10")
			})
			require.Equal(t, 3, p.controller.made, "no pod was made anew")
		})
	}
}

// over reports whether all launchers have ended with that status: their pods have succeeded, or their output says so.
func (p *play) over(status string) bool {
	n := 0
	for _, pod := range p.pods() {
		c := p.kubelet[pod.Metadata.UID]
		if pod.Status.Phase == "Succeeded" || c != nil && strings.Contains(c.process.tail(), "ended with "+status+"\n") {
			n++
		}
	}
	return n == 3
}

// path has the programs before all others.
func (p *play) path() string { return "PATH=" + filepath.Dir(p.launch) + ":/usr/bin:/bin" }
